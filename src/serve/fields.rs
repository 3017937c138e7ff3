//! A JSON object that must be used up: every field is taken by somebody who understands it, and one that is left over is refused
//! by name. `null` is a field that was not given.

use super::error::ApiError;
use serde_json::{Map, Value};

/// Fields of an object that nobody has taken yet.
pub struct Fields {
    map: Map<String, Value>,
    /// How the object is called in errors; empty for the request itself.
    path: String,
}

/// What a JSON value is, in words.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() => "a number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The error for a value of another kind than `expected`.
pub fn wrong_type(param: &str, expected: &str, seen: &Value) -> ApiError {
    ApiError::param(param, "invalid_type", format!("`{param}` must be {expected}, not {}", kind(seen)))
}

impl Fields {
    /// The fields of the request's body.
    pub fn of_body(body: &[u8]) -> Result<Self, ApiError> {
        let value =
            serde_json::from_slice(body).map_err(|e| ApiError::request(format!("the body is not valid JSON: {e}")))?;
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => Err(ApiError::request(format!("the body must be a JSON object, not {}", kind(&other)))),
        }
    }

    /// The fields of the object `value`, which is called `path`.
    pub fn of(value: Value, path: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// How a field is called in errors.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_string() } else { format!("{}.{field}", self.path) }
    }

    /// Takes a field; `None` if it is not there or `null`.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|v| !v.is_null())
    }

    /// Takes a string.
    pub fn string(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.name(field), "a string", &other)),
        }
    }

    /// Takes a boolean.
    pub fn boolean(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(wrong_type(&self.name(field), "a boolean", &other)),
        }
    }

    /// Takes a number for which `fits` holds; `range` says what that is.
    pub fn number(&mut self, field: &str, range: &str, fits: fn(f64) -> bool) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let name = self.name(field);
        let Some(number) = value.as_f64() else { return Err(wrong_type(&name, "a number", &value)) };
        match fits(number) {
            true => Ok(Some(number)),
            false => Err(ApiError::param(&name, "invalid_value", format!("`{name}` is {number}; it must be {range}"))),
        }
    }

    /// Takes a whole number from `least` to `most`.
    pub fn whole(&mut self, field: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let name = self.name(field);
        if !value.is_number() || value.is_f64() {
            return Err(wrong_type(&name, "an integer", &value));
        }
        match value.as_u64().filter(|n| (least..=most).contains(n)) {
            Some(number) => Ok(Some(number)),
            None => {
                let said = format!("`{name}` is {value}; it must be {least} to {most}");
                Err(ApiError::param(&name, "invalid_value", said))
            }
        }
    }

    /// Takes a field that may only have a value which asks for nothing; anything else is refused with `why`.
    pub fn neutral(&mut self, field: &str, neutral: fn(&Value) -> bool, why: &str) -> Result<(), ApiError> {
        match self.take(field) {
            Some(value) if !neutral(&value) => {
                let name = self.name(field);
                Err(ApiError::unsupported(&name, format!("`{name}` is not supported: {why}")))
            }
            _ => Ok(()),
        }
    }

    /// Ends it: nothing may be left.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, v)| !v.is_null()) {
            None => Ok(()),
            Some((field, _)) => {
                let name = self.name(field);
                Err(ApiError::param(&name, "unknown_parameter", format!("`{name}` is not a parameter of this server")))
            }
        }
    }
}
