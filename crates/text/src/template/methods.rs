//! Methods of Python's built-in types that templates call, where `minijinja_contrib::pycompat` lacks them or treats
//! whitespace, lines or optional arguments differently.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::python::pay_for_bytes;

/// Calls a method that the value does not have by itself.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let length =
            args.iter().filter_map(Value::as_str).map(str::len).fold(text.len(), usize::saturating_add);
        pay_for_bytes(state, length)?;
        if let Some(result) = string_method(state, text, method, args)? {
            return Ok(result);
        }
    } else {
        // Methods of containers look at each element at most.
        state.consume_fuel(value.len().unwrap_or(0) as u64)?;
        if let Some(result) = container_method(value, method, args)? {
            return Ok(result);
        }
    }
    pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(
    state: &mut State,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let strip = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
            let text = if method == "rstrip" { text } else { text.trim_start_matches(strip) };
            Value::from(if method == "lstrip" { text } else { text.trim_end_matches(strip) })
        }
        "split" | "rsplit" => {
            let (separator, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = match separator {
                Some(value) => Some(value),
                None => named.get("sep")?,
            };
            let separator = separator.filter(|value| !value.is_none());
            let limit = match limit {
                Some(limit) => Some(limit),
                None => named.get("maxsplit")?,
            };
            named.assert_all_used()?;
            let limit = usize::try_from(limit.unwrap_or(-1)).unwrap_or(usize::MAX);
            let parts = match &separator {
                None if method == "split" => split_at_space(text, limit),
                None => rsplit_at_space(text, limit),
                Some(value) => match value.as_str() {
                    Some("") => return Err(invalid("empty separator")),
                    Some(separator) if method == "split" => {
                        text.splitn(limit.saturating_add(1), separator).collect()
                    }
                    Some(separator) => {
                        let mut parts: Vec<_> = text.rsplitn(limit.saturating_add(1), separator).collect();
                        parts.reverse();
                        parts
                    }
                    None => return Err(invalid("the separator of split must be a string")),
                },
            };
            state.consume_fuel(parts.len() as u64)?;
            parts.into_iter().map(Value::from).collect()
        }
        "splitlines" => {
            let (keep, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = match keep {
                Some(keep) => keep,
                None => named.get::<Option<bool>>("keepends")?.unwrap_or(false),
            };
            named.assert_all_used()?;
            let lines = split_lines(text, keep);
            state.consume_fuel(lines.len() as u64)?;
            lines.into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("empty separator"));
            }
            let parts = match method {
                "partition" => text.split_once(separator).map_or([text, "", ""], |(a, b)| [a, separator, b]),
                _ => text.rsplit_once(separator).map_or(["", "", text], |(a, b)| [a, separator, b]),
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (skipped, part) = slice(text, start, end);
            let found = match method {
                "find" | "index" => part.find(what),
                _ => part.rfind(what),
            };
            match found {
                Some(at) => Value::from(skipped + part[..at].chars().count()),
                None if method.ends_with("index") => return Err(invalid("substring not found")),
                None => Value::from(-1),
            }
        }
        "count" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (_, part) = slice(text, start, end);
            Value::from(if what.is_empty() { part.chars().count() + 1 } else { part.matches(what).count() })
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            let fill = match fill.map(|fill| fill.chars().collect::<Vec<_>>()).as_deref() {
                None => ' ',
                Some([fill]) => *fill,
                Some(_) => return Err(invalid("the fill character must be exactly one character long")),
            };
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
            pay_for_bytes(state, missing.saturating_mul(fill.len_utf8()))?;
            let pad = |count| String::from(fill).repeat(count);
            // Python puts the odd space to the left if the width is odd.
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            Value::from(match method {
                "ljust" => format!("{text}{}", pad(missing)),
                "rjust" => format!("{}{text}", pad(missing)),
                "center" => format!("{}{text}{}", pad(left), pad(missing - left)),
                _ => {
                    let digits = text.trim_start_matches(['+', '-']);
                    let sign = &text[..(text.len() - digits.len()).min(1)];
                    format!("{sign}{}{}", "0".repeat(missing), &text[sign.len()..])
                }
            })
        }
        // With one argument they are pycompat's.
        "startswith" | "endswith" if args.len() > 1 => {
            let (what, start, end): (Value, Option<i64>, Option<i64>) = from_args(args)?;
            let (_, part) = slice(text, start, end);
            pycompat::unknown_method_callback(state, &Value::from(part), method, &[what])?
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| {
                if c.is_lowercase() { c.to_uppercase().to_string() } else { c.to_lowercase().to_string() }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "title" => {
            let () = from_args(args)?;
            let mut in_word = false;
            let mut output = String::with_capacity(text.len());
            for character in text.chars() {
                if in_word {
                    output.extend(character.to_lowercase());
                } else {
                    output.extend(character.to_uppercase());
                }
                in_word = character.is_alphabetic();
            }
            Value::from(output)
        }
        _ => return Ok(None),
    }))
}

fn container_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match (value.kind(), method) {
        (ValueKind::Seq | ValueKind::Map, "copy") => {
            let () = from_args(args)?;
            value.clone()
        }
        (ValueKind::Seq, "index") => {
            let (what,): (&Value,) = from_args(args)?;
            let position = value.try_iter()?.position(|item| item == *what);
            Value::from(position.ok_or_else(|| invalid("the value is not in the list"))?)
        }
        _ => return Ok(None),
    }))
}

/// `str.isspace` of one character.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// `split()` without a separator: at runs of whitespace. After `limit` splits the rest stays as it is.
fn split_at_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if parts.len() == limit { None } else { rest.find(is_space) };
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

/// The same from the right.
fn rsplit_at_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let after_space = |part: &str| part.trim_end_matches(|c| !is_space(c)).len();
        let start = if parts.len() == limit { 0 } else { after_space(rest) };
        let (before, part) = rest.split_at(start);
        parts.push(part);
        rest = before.trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// `splitlines`, at each of the characters that Python takes for the end of a line.
fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let (line, end) = rest.split_at(at);
        let width = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        lines.push(if keep_ends { &rest[..at + width] } else { line });
        rest = &end[width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// `text[start:end]` in characters: how many were skipped, and the part.
fn slice(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    if start.is_none() && end.is_none() {
        return (0, text);
    }
    let length = text.chars().count();
    let position = |index: i64| {
        let distance = usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX);
        if index < 0 { length.saturating_sub(distance) } else { distance.min(length) }
    };
    let end = end.map_or(length, position);
    let start = start.map_or(0, position).min(end);
    let byte = |index| text.char_indices().nth(index).map_or(text.len(), |(at, _)| at);
    (start, &text[byte(start)..byte(end)])
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_at_whitespace_keeps_the_far_side_of_the_rest() {
        assert_eq!(split_at_space("  a b  c ", usize::MAX), ["a", "b", "c"]);
        assert_eq!(split_at_space("  a b  c ", 1), ["a", "b  c "]);
        assert_eq!(rsplit_at_space("  a b  c ", 1), ["  a b", "c"]);
        assert_eq!(split_at_space("  a b  c ", 0), ["a b  c "]);
        assert_eq!(split_at_space("  a b  c ", 2), ["a", "b", "c "]);
        assert_eq!(split_at_space("  a b  c ", 3), ["a", "b", "c"]);
        assert_eq!(split_at_space("a a", 1), ["a", "a"]);
        assert_eq!(split_at_space(" \x1c ", usize::MAX), [""; 0]);
        assert_eq!(rsplit_at_space(" ", 0), [""; 0]);
    }

    #[test]
    fn lines_end_where_python_ends_them() {
        assert_eq!(split_lines("a\r\nb\rc\n\nd\u{2028}e\x0b", false), ["a", "b", "c", "", "d", "e"]);
        assert_eq!(split_lines("a\r\nb\n", true), ["a\r\n", "b\n"]);
        assert_eq!(split_lines("", false), [""; 0]);
    }
}
