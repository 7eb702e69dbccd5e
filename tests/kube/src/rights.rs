//! Who may do what: rules as those of a Role, which every request is held to once a test has given some.

use serde_json::{Value, json};

use crate::{
    status::Refusal,
    world::{Asked, World},
};

/// What a request needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    /// "create".
    pub verb: String,
    /// "" for Kubernetes' own.
    pub group: String,
    /// "pods", or "pods/exec".
    pub resource: String,
    /// Empty: in all.
    pub namespace: String,
    /// Empty: of all of them.
    pub name: String,
}

/// A rule of a Role, and where it is bound.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    names: Vec<String>,
    /// None: everywhere.
    namespace: Option<String>,
}

fn words(value: &Value) -> Vec<String> {
    let all = value.as_array().into_iter().flatten();
    all.filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

impl Rule {
    /// Those of a Role's or ClusterRole's `rules`.
    pub(crate) fn all(namespace: Option<&str>, rules: &Value) -> Vec<Self> {
        let of = |rule: &Value| Self {
            verbs: words(&rule["verbs"]),
            groups: words(&rule["apiGroups"]),
            resources: words(&rule["resources"]),
            names: words(&rule["resourceNames"]),
            namespace: namespace.map(str::to_owned),
        };
        rules.as_array().into_iter().flatten().map(of).collect()
    }

    fn gives(&self, right: &Right) -> bool {
        let has = |all: &[String], word: &str| all.iter().any(|one| one == word || one == "*");
        has(&self.verbs, &right.verb)
            && has(&self.groups, &right.group)
            && has(&self.resources, &right.resource)
            && (self.names.is_empty() || self.names.contains(&right.name))
            && self.namespace.as_ref().is_none_or(|one| *one == right.namespace)
    }
}

impl Asked {
    /// The rights that a real server asks for; none for discovery and for reviews, which everybody may make.
    pub fn rights(&self) -> Vec<Right> {
        let parts: Vec<&str> = self.path.trim_matches('/').split('/').collect();
        let (group, rest) = match parts.as_slice() {
            ["api", _, rest @ ..] => ("", rest),
            ["apis", group, _, rest @ ..] => (*group, rest),
            _ => return Vec::new(),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let at = |n: usize| rest.get(n).copied().unwrap_or_default();
        if rest.is_empty() || group == "authorization.k8s.io" {
            return Vec::new();
        }
        let sub = at(2);
        let resource = if sub.is_empty() { at(0).to_owned() } else { format!("{}/{sub}", at(0)) };
        let verb = match (self.method.as_str(), at(1).is_empty()) {
            ("GET", true) if self.query.contains("watch=true") => "watch",
            ("GET", true) => "list",
            ("GET", false) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "deletecollection",
            _ => "delete",
        };
        let right = |verb: &str| Right {
            verb: verb.to_owned(),
            group: group.to_owned(),
            resource: resource.clone(),
            namespace: namespace.to_owned(),
            name: at(1).to_owned(),
        };
        // From 1.35 on a websocket needs both.
        if sub == "exec" { vec![right("get"), right("create")] } else { vec![right(verb)] }
    }
}

impl World {
    /// From now on the client may do what such rules give, in this namespace or (none) everywhere, and nothing else but
    /// what other rules give.
    pub fn grant(&self, namespace: Option<&str>, rules: &Value) {
        self.lock().rules.get_or_insert_default().extend(Rule::all(namespace, rules));
    }

    /// The client may not do this, whatever rules say.
    pub fn deny(&self, verb: &str, resource: &str) {
        self.lock().denied.push((verb.to_owned(), resource.to_owned()));
    }

    fn may(&self, right: &Right) -> bool {
        let inner = self.lock();
        let denied = inner.denied.iter().any(|(verb, of)| *verb == right.verb && *of == right.resource);
        !denied && inner.rules.as_ref().is_none_or(|all| all.iter().any(|rule| rule.gives(right)))
    }
}

/// Refuses what the client may not do.
pub(crate) fn check(world: &World, asked: &Asked) -> Result<(), Refusal> {
    let Some(right) = asked.rights().into_iter().find(|right| !world.may(right)) else { return Ok(()) };
    let message = format!(
        "{} \"{}\" is forbidden: User \"torpor\" cannot {} resource \"{}\" in API group \"{}\" in the namespace \"{}\"",
        right.resource, right.name, right.verb, right.resource, right.group, right.namespace
    );
    Err(Refusal::new(403, "Forbidden", message, json!({"name": right.name, "kind": right.resource})))
}

/// A SelfSubjectAccessReview.
pub(crate) fn review(world: &World, asked: &Value) -> Value {
    let wanted = &asked["spec"]["resourceAttributes"];
    let word = |name: &str| wanted[name].as_str().unwrap_or_default().to_owned();
    let resource = match word("subresource").as_str() {
        "" => word("resource"),
        sub => format!("{}/{sub}", word("resource")),
    };
    let right = Right {
        verb: word("verb"),
        group: word("group"),
        resource,
        namespace: word("namespace"),
        name: word("name"),
    };
    let mut review = asked.clone();
    review["status"] = json!({"allowed": world.may(&right)});
    review
}
