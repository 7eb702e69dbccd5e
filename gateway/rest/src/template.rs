//! Path templates of google.api.http: literals, `{field}` for one segment, `{field=**}` for the rest, `:verb` at the end.

use percent_encoding::percent_decode_str;

/// A field of the request, by the names on the way to it.
pub type FieldPath = Vec<String>;

/// One part between slashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Segment {
    Literal(String),
    Field(FieldPath),
    /// Everything to the end, slashes included.
    Rest(FieldPath),
}

/// A path with holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    segments: Vec<Segment>,
    verb: Option<String>,
}

/// A path of a request, cut but not yet decoded: an encoded slash is no slash.
pub struct RawPath<'a>(Vec<&'a str>);

impl<'a> RawPath<'a> {
    /// Cuts a path, which begins with a slash.
    pub fn new(path: &'a str) -> Self {
        Self(path.strip_prefix('/').unwrap_or(path).split('/').collect())
    }
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// What is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix('/').ok_or_else(|| format!("'{text}' does not begin with a slash"))?;
        // A colon after the last brace and the last slash begins the verb.
        let tail = path.rfind(['/', '}']).map_or(0, |at| at + 1);
        let (path, verb) = match path[tail..].find(':') {
            Some(at) => (&path[..tail + at], Some(path[tail + at + 1..].to_owned())),
            None => (path, None),
        };
        let segments: Vec<Segment> = path.split('/').map(segment).collect::<Result<_, _>>()?;
        let inner = segments.len().saturating_sub(1);
        if segments.iter().take(inner).any(|s| matches!(s, Segment::Rest(_))) {
            return Err(format!("'{text}': '**' may only be the last segment"));
        }
        if verb.as_ref().is_some_and(String::is_empty)
            || segments.iter().any(|s| *s == Segment::Literal(String::new()))
        {
            return Err(format!("'{text}' has an empty part"));
        }
        Ok(Self { segments, verb })
    }

    /// The fields and their values when a path fits; none when it doesn't.
    pub fn matches(&self, path: &RawPath<'_>) -> Option<Vec<(FieldPath, String)>> {
        let mut parts = path.0.clone();
        if let Some(verb) = &self.verb {
            let last = parts.last_mut()?;
            *last = last.strip_suffix(verb.as_str())?.strip_suffix(':')?;
        }
        let mut found = Vec::new();
        for (at, segment) in self.segments.iter().enumerate() {
            match segment {
                Segment::Literal(literal) => {
                    (decode(parts.get(at)?)? == *literal).then_some(())?;
                }
                Segment::Field(field) => {
                    let value = decode(parts.get(at)?)?;
                    (!value.is_empty()).then_some(())?;
                    found.push((field.clone(), value));
                }
                Segment::Rest(field) => {
                    let value = decode(&parts.get(at..)?.join("/"))?;
                    (!value.is_empty()).then_some(())?;
                    found.push((field.clone(), value));
                    return Some(found);
                }
            }
        }
        (parts.len() == self.segments.len()).then_some(found)
    }

    /// The fields that the path names.
    pub fn fields(&self) -> impl Iterator<Item = &FieldPath> {
        self.segments.iter().filter_map(|segment| match segment {
            Segment::Field(field) | Segment::Rest(field) => Some(field),
            Segment::Literal(_) => None,
        })
    }

    /// As OpenAPI writes it; a field is named by the last of its names.
    pub fn shown(&self) -> String {
        let part = |segment: &Segment| match segment {
            Segment::Literal(literal) => literal.clone(),
            Segment::Field(field) | Segment::Rest(field) => format!("{{{}}}", short(field)),
        };
        let path: Vec<String> = self.segments.iter().map(part).collect();
        let verb = self.verb.as_ref().map(|verb| format!(":{verb}")).unwrap_or_default();
        format!("/{}{verb}", path.join("/"))
    }

    /// What comes first is tried first: verbs before none, literals before fields, one segment before the rest.
    pub fn rank(&self) -> impl Ord + use<> {
        (self.verb.is_none(), self.segments.clone(), self.verb.clone())
    }
}

/// The name that a field of a path goes by in the OpenAPI document.
pub fn short(field: &FieldPath) -> &str {
    field.last().map(String::as_str).unwrap_or_default()
}

fn segment(text: &str) -> Result<Segment, String> {
    let Some(inner) = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) else {
        let plain = !text.contains(['{', '}', '*']);
        return if plain {
            Ok(Segment::Literal(text.to_owned()))
        } else {
            Err(format!("'{text}' is not understood"))
        };
    };
    let (field, pattern) = inner.split_once('=').unwrap_or((inner, "*"));
    let field: FieldPath = field.split('.').map(str::to_owned).collect();
    if field.iter().any(String::is_empty) {
        return Err(format!("'{text}' names no field"));
    }
    match pattern {
        "*" => Ok(Segment::Field(field)),
        "**" => Ok(Segment::Rest(field)),
        other => Err(format!("'{text}': pattern '{other}' is neither '*' nor '**'")),
    }
}

/// Text without its percent signs; none when it is not UTF-8 then.
pub fn decode(text: &str) -> Option<String> {
    percent_decode_str(text).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(template: &str, path: &str) -> Option<Vec<String>> {
        let fields = Template::parse(template).unwrap().matches(&RawPath::new(path))?;
        Some(fields.into_iter().map(|(field, value)| format!("{}={value}", field.join("."))).collect())
    }

    #[test]
    fn fields_take_one_decoded_segment_or_the_rest() {
        assert_eq!(found("/v1/sandboxes/{sandbox}", "/v1/sandboxes/a%2Fb").unwrap(), ["sandbox=a/b"]);
        assert_eq!(found("/v1/sandboxes/{sandbox}", "/v1/sandboxes/a/b"), None);
        assert_eq!(found("/v1/sandboxes/{sandbox}", "/v1/sandboxes/"), None);
        assert_eq!(found("/v1/sandboxes/{sandbox}", "/v1/sandboxes/%ff"), None);
        let image = found("/v1/images/{image=**}", "/v1/images/docker.io/library/alpine:3").unwrap();
        assert_eq!(image, ["image=docker.io/library/alpine:3"]);
        let port =
            found("/v1/s/{start.sandbox}/ports/{start.port}:forward", "/v1/s/web/ports/80:forward").unwrap();
        assert_eq!(port, ["start.sandbox=web", "start.port=80"]);
    }

    #[test]
    fn a_verb_is_what_follows_the_last_colon() {
        assert_eq!(found("/v1/s/{s}:stop", "/v1/s/web:stop").unwrap(), ["s=web"]);
        assert_eq!(found("/v1/s/{s}:stop", "/v1/s/web:start"), None);
        assert_eq!(found("/v1/s/{s}:stop", "/v1/s/:stop"), None);
        assert_eq!(found("/v1/s:watch", "/v1/s:watch").unwrap(), Vec::<String>::new());
        assert_eq!(Template::parse("/v1/s/{t.s}/disk:grow").unwrap().shown(), "/v1/s/{s}/disk:grow");
    }

    #[test]
    fn templates_beyond_these_are_refused() {
        for text in ["v1", "/v1//x", "/v1/{a=b/*}", "/v1/{a=**}/x", "/v1/x:", "/v1/{}", "/v1/*"] {
            Template::parse(text).unwrap_err();
        }
    }
}
