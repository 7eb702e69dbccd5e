//! What clients of the .proto files stand on, as facts in lines of text, and which changes of it break them.

use std::collections::{BTreeMap, BTreeSet};

use prost_reflect::{
    Cardinality, DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    Value,
};

/// Keys ("field torpor.v1.Sandbox 1") and what is said of each ("name=id json=id type=string label=singular").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surface(BTreeMap<String, String>);

/// How a surface differs from the recorded one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Clients of the recorded one break, each with what it is.
    pub breaks: Vec<String>,
    /// Keys that are not recorded yet.
    pub added: Vec<String>,
}

impl Surface {
    /// Of all types and services but Google's own.
    pub fn read(pool: &DescriptorPool) -> Self {
        let mut all = Self::default();
        for message in pool.all_messages().filter(|one| ours(one.package_name()) && !one.is_map_entry()) {
            all.message(&message);
        }
        for of in pool.all_enums().filter(|one| ours(one.package_name())) {
            all.enumeration(&of);
        }
        for service in pool.services().filter(|one| ours(one.package_name())) {
            all.add(format!("service {}", service.full_name()), "");
            for method in service.methods() {
                all.method(pool, &method);
            }
        }
        all
    }

    fn add(&mut self, key: String, fact: impl Into<String>) {
        self.0.insert(key, fact.into());
    }

    fn message(&mut self, message: &MessageDescriptor) {
        self.add(format!("message {}", message.full_name()), "");
        for field in message.fields() {
            self.add(format!("field {} {}", message.full_name(), field.number()), field_fact(&field));
        }
    }

    fn enumeration(&mut self, of: &EnumDescriptor) {
        self.add(format!("enum {}", of.full_name()), "");
        for value in of.values() {
            self.add(
                format!("value {} {}", of.full_name(), value.number()),
                format!("name={}", value.name()),
            );
        }
    }

    fn method(&mut self, pool: &DescriptorPool, method: &MethodDescriptor) {
        let stream = |is: bool| if is { "stream-" } else { "" };
        let (input, output) = (method.input(), method.output());
        let fact = format!(
            "takes={}{} gives={}{}",
            stream(method.is_client_streaming()),
            input.full_name(),
            stream(method.is_server_streaming()),
            output.full_name()
        );
        self.add(format!("method {}", method.full_name()), fact);
        for (way, body) in http_rules(pool, method) {
            self.add(format!("http {way}"), format!("method={} body={body}", method.full_name()));
        }
    }

    /// One fact a line, in order.
    pub fn text(&self) -> String {
        let line = |(key, fact): (&String, &String)| match fact.as_str() {
            "" => format!("{key}\n"),
            fact => format!("{key}: {fact}\n"),
        };
        self.0.iter().map(line).collect()
    }

    /// Reads [`Surface::text`]; lines that begin with '#' are comments.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let split = |line: &str| {
            let (key, fact) = line.split_once(": ").unwrap_or((line, ""));
            (key.to_owned(), fact.to_owned())
        };
        Self(lines.map(split).collect())
    }

    /// What is different since `recorded`.
    pub fn since(&self, recorded: &Self) -> Difference {
        let mut difference = Difference::default();
        for (key, old) in &recorded.0 {
            match self.0.get(key) {
                None => difference.breaks.push(self.gone(key, old)),
                Some(new) if new != old => difference.breaks.push(changed(key, old, new)),
                Some(_) => {}
            }
        }
        difference.added = self.0.keys().filter(|key| !recorded.0.contains_key(*key)).cloned().collect();
        difference
    }

    /// A thing that is no longer there, or has another number.
    fn gone(&self, key: &str, old: &str) -> String {
        let (of, number) = key.rsplit_once(' ').unwrap_or((key, ""));
        let name = part(old, "name");
        let elsewhere = self.0.iter().find_map(|(other, fact)| {
            let (same, number) = other.rsplit_once(' ')?;
            (same == of && !name.is_empty() && part(fact, "name") == name).then_some(number)
        });
        let shown = if name.is_empty() { String::new() } else { format!(" ({name})") };
        match elsewhere {
            Some(new) => format!("{of} {name}: its number was {number}, is {new}"),
            None => format!("{key}{shown} is gone"),
        }
    }
}

fn ours(package: &str) -> bool {
    !package.starts_with("google.")
}

fn part<'a>(fact: &'a str, label: &str) -> &'a str {
    let found = fact.split(' ').find_map(|one| one.strip_prefix(label)?.strip_prefix('='));
    found.unwrap_or_default()
}

fn changed(key: &str, old: &str, new: &str) -> String {
    let labels = |fact: &str| -> BTreeSet<String> {
        fact.split(' ').filter_map(|one| Some(one.split_once('=')?.0.to_owned())).collect()
    };
    let all: BTreeSet<String> = labels(old).union(&labels(new)).cloned().collect();
    let shown = |value: &str| if value.is_empty() { "nothing".to_owned() } else { value.to_owned() };
    let differences: Vec<String> = all
        .iter()
        .filter(|label| part(old, label) != part(new, label))
        .map(|label| format!("{label} was {}, is {}", shown(part(old, label)), shown(part(new, label))))
        .collect();
    format!("{key}: {}", differences.join("; "))
}

fn field_fact(field: &FieldDescriptor) -> String {
    let label = match field.cardinality() {
        _ if field.is_map() => "map",
        Cardinality::Repeated => "repeated",
        Cardinality::Required => "required",
        // A message always tells whether it is there.
        Cardinality::Optional if field.supports_presence() && field.kind().as_message().is_none() => {
            "optional"
        }
        Cardinality::Optional => "singular",
    };
    let mut fact =
        format!("name={} json={} type={} label={label}", field.name(), field.json_name(), type_name(field));
    if let Some(oneof) = field.containing_oneof().filter(|oneof| !oneof.is_synthetic()) {
        fact.push_str(&format!(" oneof={}", oneof.name()));
    }
    fact
}

fn type_name(field: &FieldDescriptor) -> String {
    match field.kind() {
        Kind::Message(entry) if field.is_map() => {
            let (key, value) = (entry.map_entry_key_field(), entry.map_entry_value_field());
            format!("{},{}", type_name(&key), type_name(&value))
        }
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(of) => of.full_name().to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    }
}

/// "POST /v1/sandboxes" and the body's field, of the method's google.api.http rules.
fn http_rules(pool: &DescriptorPool, method: &MethodDescriptor) -> Vec<(String, String)> {
    let options = method.options();
    let option = pool.get_extension_by_name("google.api.http");
    let Some(option) = option.filter(|option| options.has_extension(option)) else { return Vec::new() };
    let Value::Message(rule) = options.get_extension(&option).into_owned() else { return Vec::new() };
    let mut rules = vec![rule.clone()];
    if let Some(more) = rule.get_field_by_name("additional_bindings")
        && let Some(more) = more.as_list()
    {
        rules.extend(more.iter().filter_map(Value::as_message).cloned());
    }
    let text = |rule: &prost_reflect::DynamicMessage, name: &str| {
        let value = rule.get_field_by_name(name);
        value.and_then(|value| value.as_str().map(str::to_owned)).filter(|text| !text.is_empty())
    };
    let verbs = ["get", "put", "post", "delete", "patch"];
    let ways = rules.iter().filter_map(|rule| {
        let (verb, path) = verbs.iter().find_map(|verb| Some((verb, text(rule, verb)?)))?;
        Some((format!("{} {path}", verb.to_uppercase()), text(rule, "body").unwrap_or_default()))
    });
    ways.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"
        syntax = "proto3";
        package t.v1;
        import "google/api/annotations.proto";
        service S {
          rpc Get(A) returns (B) { option (google.api.http) = { get: "/v1/a/{name}" }; }
          rpc Watch(A) returns (stream B);
        }
        message A { string name = 1; optional int32 size = 2; map<string, string> tags = 3; }
        message B { oneof kind { string text = 1; bytes data = 2; } repeated A all = 3; E e = 4; }
        enum E { E_NONE = 0; E_ONE = 1; }
    "#;

    fn surface(text: &str) -> Surface {
        let dir = std::env::temp_dir().join(format!(
            "torpor-surface-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("t.proto"), text).unwrap();
        let includes = [dir.clone(), crate::root().join("proto/proto")];
        let pool = crate::golden::compile(&includes, &["t.proto".into()]);
        std::fs::remove_dir_all(&dir).unwrap();
        Surface::read(&pool.unwrap())
    }

    /// What a replacement in the file does.
    fn after(from: &str, to: &str) -> Difference {
        assert_eq!(BEFORE.matches(from).count(), 1, "{from}");
        surface(&BEFORE.replace(from, to)).since(&surface(BEFORE))
    }

    fn breaks(from: &str, to: &str) -> String {
        after(from, to).breaks.join(" | ")
    }

    #[test]
    fn nothing_changed_is_no_difference_and_the_text_is_the_surface() {
        let before = surface(BEFORE);
        assert_eq!(before.since(&before), Difference::default());
        assert_eq!(Surface::parse(&before.text()), before);
        assert!(before.text().contains("field t.v1.A 2: name=size json=size type=int32 label=optional\n"));
        assert!(before.text().contains("field t.v1.A 3: name=tags json=tags type=string,string label=map\n"));
    }

    #[test]
    fn additions_break_nothing_and_are_listed() {
        let difference = after("string name = 1;", "string name = 1; bool more = 9;");
        assert_eq!(difference, Difference { breaks: vec![], added: vec!["field t.v1.A 9".into()] });
        let difference = after("E_ONE = 1;", "E_ONE = 1; E_TWO = 2;");
        assert_eq!(difference.added, ["value t.v1.E 2"]);
        let difference = after("rpc Watch", "rpc New(A) returns (B); rpc Watch");
        assert_eq!((difference.breaks.len(), difference.added), (0, vec!["method t.v1.S.New".to_owned()]));
    }

    #[test]
    fn a_field_that_is_gone_renamed_or_renumbered_breaks() {
        assert_eq!(breaks("string name = 1;", ""), "field t.v1.A 1 (name) is gone");
        let renamed = breaks("string name = 1;", "string title = 1;");
        assert_eq!(renamed, "field t.v1.A 1: json was name, is title; name was name, is title");
        assert_eq!(
            breaks("string name = 1;", "string name = 7;"),
            "field t.v1.A name: its number was 1, is 7"
        );
    }

    #[test]
    fn another_type_label_oneof_or_json_name_breaks() {
        assert_eq!(breaks("int32 size", "int64 size"), "field t.v1.A 2: type was int32, is int64");
        assert_eq!(breaks("optional int32", "int32"), "field t.v1.A 2: label was optional, is singular");
        assert_eq!(breaks("repeated A all", "A all"), "field t.v1.B 3: label was repeated, is singular");
        assert_eq!(
            breaks("<string, string>", "<string, bytes>"),
            "field t.v1.A 3: type was string,string, is string,bytes"
        );
        let moved = breaks("E e = 4;", "oneof other { E e = 4; }");
        assert_eq!(moved, "field t.v1.B 4: label was singular, is optional; oneof was nothing, is other");
        let json = breaks("string name = 1;", "string name = 1 [json_name = \"Name\"];");
        assert_eq!(json, "field t.v1.A 1: json was name, is Name");
    }

    #[test]
    fn enum_values_and_whole_types_stay() {
        assert_eq!(breaks("E_ONE = 1;", "E_UNO = 1;"), "value t.v1.E 1: name was E_ONE, is E_UNO");
        assert_eq!(breaks("E_ONE = 1;", "E_ONE = 5;"), "value t.v1.E E_ONE: its number was 1, is 5");
        assert_eq!(breaks("E_ONE = 1;", ""), "value t.v1.E 1 (E_ONE) is gone");
        let gone = surface(&BEFORE.replace("E e = 4;", "").replace("enum E { E_NONE = 0; E_ONE = 1; }", ""));
        assert!(gone.since(&surface(BEFORE)).breaks.contains(&"enum t.v1.E is gone".to_owned()));
        assert!(
            Surface::default().since(&surface(BEFORE)).breaks.contains(&"message t.v1.A is gone".to_owned())
        );
    }

    #[test]
    fn methods_and_their_paths_stay() {
        assert_eq!(breaks("rpc Watch(A) returns (stream B);", ""), "method t.v1.S.Watch is gone");
        assert_eq!(
            breaks("returns (stream B)", "returns (B)"),
            "method t.v1.S.Watch: gives was stream-t.v1.B, is t.v1.B"
        );
        assert_eq!(breaks("Watch(A)", "Watch(B)"), "method t.v1.S.Watch: takes was t.v1.A, is t.v1.B");
        assert_eq!(breaks("/v1/a/{name}", "/v1/as/{name}"), "http GET /v1/a/{name} is gone");
        let body = breaks("get: \"/v1/a/{name}\"", "get: \"/v1/a/{name}\" body: \"*\"");
        assert_eq!(body, "http GET /v1/a/{name}: body was nothing, is *");
    }
}
