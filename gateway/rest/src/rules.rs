//! Which path leads to which method: the HTTP rules of the descriptors, and a uniform path for every method.

use std::collections::BTreeSet;

use http::Method;
use prost_reflect::{DescriptorPool, DynamicMessage, ExtensionDescriptor, MethodDescriptor, Value};

use crate::{
    RestError,
    template::{FieldPath, RawPath, Template},
};

/// The option of a method that holds its rule.
const HTTP: &str = "google.api.http";

/// What of a request its body is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyRule {
    /// There is none.
    Nothing,
    /// All that the path doesn't name.
    Everything,
    /// One field.
    Field(String),
}

/// One way to a method.
#[derive(Clone, Debug)]
pub struct Route {
    /// GET, POST …
    pub verb: Method,
    /// The path.
    pub template: Template,
    /// The body.
    pub body: BodyRule,
    /// The method.
    pub method: MethodDescriptor,
    /// Unique among all routes.
    pub operation: String,
}

/// All ways.
pub struct Routes(Vec<Route>);

/// What a request's verb and path lead to.
pub enum Found<'a> {
    /// A method, with the fields of the path.
    Route(&'a Route, Vec<(FieldPath, String)>),
    /// The path is known, but not with this verb; these are.
    WrongVerb(Vec<Method>),
    /// Nothing.
    Nothing,
}

impl Routes {
    /// Reads the rules of all methods of a package.
    ///
    /// # Errors
    /// A rule that is not understood, names a field that isn't there, or leads to two methods.
    pub fn read(pool: &DescriptorPool, package: &str) -> Result<Self, RestError> {
        let option = pool.get_extension_by_name(HTTP);
        let mut routes = Vec::new();
        for service in pool.services().filter(|service| service.package_name() == package) {
            for method in service.methods() {
                if let Some(option) = &option {
                    annotated(&method, option, &mut routes)?;
                }
                routes.push(uniform(&method)?);
            }
        }
        routes.sort_by_cached_key(|route| (route.template.rank(), route.verb.as_str().to_owned()));
        let mut known = BTreeSet::new();
        for route in &routes {
            if !known.insert((route.template.shown(), route.verb.as_str())) {
                return Err(wrong(
                    &route.method,
                    format!("{} {} leads to another method, too", route.verb, route.template.shown()),
                ));
            }
        }
        Ok(Self(routes))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Route> {
        self.0.iter()
    }

    /// Where a request goes.
    pub fn find(&self, verb: &Method, path: &str) -> Found<'_> {
        let path = RawPath::new(path);
        let mut others = Vec::new();
        for route in &self.0 {
            let Some(fields) = route.template.matches(&path) else { continue };
            if route.verb == verb {
                return Found::Route(route, fields);
            }
            if !others.contains(&route.verb) {
                others.push(route.verb.clone());
            }
        }
        if others.is_empty() { Found::Nothing } else { Found::WrongVerb(others) }
    }
}

fn wrong(method: &MethodDescriptor, problem: String) -> RestError {
    RestError::Rule { method: method.full_name().to_owned(), problem }
}

fn uniform(method: &MethodDescriptor) -> Result<Route, RestError> {
    let service = method.parent_service();
    let version = service.package_name().rsplit('.').next().unwrap_or_default();
    let path = format!("/{version}/{}/{}", service.name(), method.name());
    Ok(Route {
        verb: Method::POST,
        template: Template::parse(&path).map_err(|problem| wrong(method, problem))?,
        body: BodyRule::Everything,
        method: method.clone(),
        operation: format!("{}_{}_uniform", service.name(), method.name()),
    })
}

fn annotated(
    method: &MethodDescriptor,
    option: &ExtensionDescriptor,
    routes: &mut Vec<Route>,
) -> Result<(), RestError> {
    let options = method.options();
    if !options.has_extension(option) {
        return Ok(());
    }
    let rule = options.get_extension(option).into_owned();
    let Value::Message(rule) = rule else { return Ok(()) };
    let mut rules = vec![rule.clone()];
    if let Some(Value::List(more)) =
        rule.get_field_by_name("additional_bindings").map(std::borrow::Cow::into_owned)
    {
        rules.extend(more.into_iter().filter_map(|one| match one {
            Value::Message(one) => Some(one),
            _ => None,
        }));
    }
    for (at, rule) in rules.iter().enumerate() {
        let number = if at == 0 { String::new() } else { format!("_{}", at + 1) };
        let operation = format!("{}_{}{number}", method.parent_service().name(), method.name());
        routes.push(route(method, rule, operation)?);
    }
    Ok(())
}

fn route(method: &MethodDescriptor, rule: &DynamicMessage, operation: String) -> Result<Route, RestError> {
    let text = |name: &str| match rule.get_field_by_name(name).map(std::borrow::Cow::into_owned) {
        Some(Value::String(text)) if !text.is_empty() => Some(text),
        _ => None,
    };
    let verbs = [
        ("get", Method::GET),
        ("put", Method::PUT),
        ("post", Method::POST),
        ("delete", Method::DELETE),
        ("patch", Method::PATCH),
    ];
    let found = verbs.into_iter().find_map(|(name, verb)| Some((verb, text(name)?)));
    let (verb, path) =
        found.ok_or_else(|| wrong(method, "the rule names no verb that is known".to_owned()))?;
    if text("response_body").is_some() {
        return Err(wrong(method, "response_body is not supported".to_owned()));
    }
    let template = Template::parse(&path).map_err(|problem| wrong(method, problem))?;
    let body = match text("body").as_deref() {
        None => BodyRule::Nothing,
        Some("*") => BodyRule::Everything,
        Some(field) => BodyRule::Field(field.to_owned()),
    };
    if method.is_client_streaming() && body == BodyRule::Nothing {
        return Err(wrong(method, "a method that takes a stream needs a body".to_owned()));
    }
    let bodies = match &body {
        BodyRule::Field(field) => vec![vec![field.clone()]],
        _ => Vec::new(),
    };
    for field in template.fields().chain(&bodies) {
        exists(method, field)?;
    }
    Ok(Route { verb, template, body, method: method.clone(), operation })
}

fn exists(method: &MethodDescriptor, path: &FieldPath) -> Result<(), RestError> {
    let mut message = Some(method.input());
    for name in path {
        let field = message.as_ref().and_then(|message| message.get_field_by_name(name));
        let Some(field) = field else {
            return Err(wrong(
                method,
                format!("{} has no field '{}'", method.input().full_name(), path.join(".")),
            ));
        };
        message = field.kind().as_message().cloned();
    }
    Ok(())
}
