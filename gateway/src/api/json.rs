//! Between `google.protobuf.Struct` and JSON.

use prost_types::{ListValue, Struct, Value as Wire, value::Kind};
use serde_json::{Map, Number, Value};

use crate::error::ApiError;

/// Numbers of a Struct are doubles: whole ones up to here are told as whole numbers, as JSON has them.
const WHOLE: f64 = 9_007_199_254_740_992.0;

/// What a client sent.
///
/// # Errors
/// `INVALID_ARGUMENT` for a number that JSON has not.
pub fn map(from: Struct, field: &str) -> Result<Map<String, Value>, ApiError> {
    from.fields.into_iter().map(|(key, wire)| value(wire, field).map(|value| (key, value))).collect()
}

fn value(from: Wire, field: &str) -> Result<Value, ApiError> {
    Ok(match from.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(yes)) => Value::Bool(yes),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() <= WHOLE => {
            Value::Number((number as i64).into())
        }
        Some(Kind::NumberValue(number)) => Number::from_f64(number)
            .map(Value::Number)
            .ok_or_else(|| ApiError::invalid(field, format!("{number} is no number of JSON")))?,
        Some(Kind::StructValue(inner)) => Value::Object(map(inner, field)?),
        Some(Kind::ListValue(list)) => {
            let all = list.values.into_iter().map(|one| value(one, field));
            Value::Array(all.collect::<Result<_, _>>()?)
        }
    })
}

/// As it is shown; none: nothing was said.
pub fn shown(from: &Map<String, Value>) -> Option<Struct> {
    (!from.is_empty()).then(|| fields(from))
}

fn fields(from: &Map<String, Value>) -> Struct {
    Struct { fields: from.iter().map(|(key, value)| (key.clone(), wire(value))).collect() }
}

fn wire(from: &Value) -> Wire {
    let kind = match from {
        Value::Null => Kind::NullValue(0),
        Value::Bool(yes) => Kind::BoolValue(*yes),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(all) => Kind::ListValue(ListValue { values: all.iter().map(wire).collect() }),
        Value::Object(inner) => Kind::StructValue(fields(inner)),
    };
    Wire { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_shown_is_what_was_sent_and_whole_numbers_stay_whole() {
        let said = json!({"a": [1, -2, 1.5, true, null, "x"], "b": {"c": {"d": 9_007_199_254_740_991_i64}}});
        let said = said.as_object().unwrap();
        let back = map(shown(said).unwrap(), "driver_config").unwrap();
        assert_eq!(&back, said);
        assert_eq!(serde_json::to_string(&back["a"]).unwrap(), r#"[1,-2,1.5,true,null,"x"]"#);
        assert_eq!(shown(&Map::new()), None);
        let odd =
            Struct { fields: [("n".to_owned(), Wire { kind: Some(Kind::NumberValue(f64::NAN)) })].into() };
        assert!(map(odd, "driver_config").is_err());
    }
}
