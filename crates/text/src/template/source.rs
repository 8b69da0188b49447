/// The filter for values that are assigned to variables. A template cannot define filters of its own.
pub(super) const BOUNDED: &str = "russet_bounded";
/// The filter for values that are assigned to attributes.
pub(super) const BOUNDED_ATTRIBUTE: &str = "russet_bounded_attribute";

/// Rewrites tags. None if one is longer than `max_tag` bytes.
///
/// - `{% generation %} … {% endgeneration %}`, which MiniJinja lacks, marks the assistant's text for training. It becomes
///   a `with` block: the same scope, the same whitespace rules, and no effect on the text.
/// - `{% set x = value %}` passes the value through the filter [`BOUNDED`], and `{% set x.y = value %}` through
///   [`BOUNDED_ATTRIBUTE`]: assignments are how a few lines build a huge value, or one that contains itself.
///
/// Tags are found exactly as MiniJinja's lexer finds them, so that no assignment can hide. Source that it will refuse
/// may come out as it is.
pub(super) fn rewrite(source: &str, max_tag: usize) -> Option<String> {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        output.push_str(before);
        // A sign after the opening belongs to it.
        let opening = 2 + usize::from(matches!(tag.as_bytes().get(2), Some(b'-' | b'+')));
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => find_from(tag, opening, "#}").map(|at| at + 2),
            Some(b'{') => end_of_code(tag, opening, "}}"),
            Some(b'%') => end_of_code(tag, opening, "%}"),
            _ => Some(1),
        };
        let is_code = matches!(tag.as_bytes().get(1), Some(b'{' | b'%'));
        if is_code && end.unwrap_or(tag.len()) > max_tag {
            return None;
        }
        let Some(end) = end else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        rest = after;
        match tag.strip_prefix("{%").and_then(|_| tag.get(opening..end.checked_sub(2)?)) {
            Some(inner) => {
                let inner = inner.strip_suffix(['-', '+']).unwrap_or(inner);
                let statement = inner.trim_ascii();
                let (open, close) = tag.split_once(statement).unwrap_or((tag, ""));
                match (statement, assignment(statement)) {
                    ("generation", _) => output.extend([open, "with", close]),
                    ("endgeneration", _) => output.extend([open, "endwith", close]),
                    (_, Some((target, value))) => {
                        let filter = if target.contains('.') { BOUNDED_ATTRIBUTE } else { BOUNDED };
                        output.extend([open, target, "=(", value, ")|", filter, close]);
                    }
                    _ => output.push_str(tag),
                }
                if statement == "raw" {
                    let end = end_of_raw(rest);
                    output.push_str(&rest[..end]);
                    rest = &rest[end..];
                }
            }
            None => output.push_str(tag),
        }
    }
    output.push_str(rest);
    Some(output)
}

/// The two sides of `set target = value`; none for a block that captures its text, and for other statements.
fn assignment(statement: &str) -> Option<(&str, &str)> {
    let rest = statement.strip_prefix("set")?;
    if rest.starts_with(|c: char| c == '_' || c.is_ascii_alphanumeric()) {
        return None;
    }
    // A target has no strings, and a filter comes before any other `=`.
    let (_, value) = rest.split_at(rest.find(['=', '|'])?);
    let target = statement.strip_suffix(value)?;
    Some((target, value.strip_prefix('=')?))
}

/// Where the code that begins with `{{` or `{%` ends: at `close` outside of strings and brackets. None if it does not
/// end, or if a bracket is closed that was not opened.
fn end_of_code(tag: &str, start: usize, close: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut open = 0usize;
    let mut index = start;
    while let Some(&byte) = bytes.get(index) {
        match (quote, byte) {
            (Some(_), b'\\') => index += 1,
            (Some(quoted), _) => quote = Some(quoted).filter(|quoted| *quoted != byte),
            (None, _) if open == 0 && bytes[index..].starts_with(close.as_bytes()) => {
                return Some(index + close.len());
            }
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => open += 1,
            (None, b')' | b']' | b'}') => open = open.checked_sub(1)?,
            (None, _) => {}
        }
        index += 1;
    }
    None
}

/// Where the `{% endraw %}` of a raw block begins.
fn end_of_raw(text: &str) -> usize {
    let is_end = |at: &usize| {
        let tag = &text[at + 2..];
        let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_ascii_start();
        let tag = tag.strip_prefix("endraw").map(str::trim_ascii_start);
        tag.is_some_and(|tag| tag.strip_prefix(['-', '+']).unwrap_or(tag).starts_with("%}"))
    };
    text.match_indices("{%").map(|(at, _)| at).find(is_end).unwrap_or(text.len())
}

fn find_from(text: &str, start: usize, what: &str) -> Option<usize> {
    text.get(start..)?.find(what).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn generation_tags_become_scopes_and_keep_their_whitespace_control() {
        for (source, expected) in [
            ("a{% generation %}b{% endgeneration %}c", "a{% with %}b{% endwith %}c"),
            ("{%- generation -%}x{%+ endgeneration -%}", "{%- with -%}x{%+ endwith -%}"),
            ("{%generation%}{%endgeneration%}", "{%with%}{%endwith%}"),
        ] {
            assert_eq!(rewrite(source, 100).as_deref(), Some(expected));
        }
    }

    #[test]
    fn assigned_values_pass_a_filter() {
        for (source, expected) in [
            (
                "{% set x = 1 %}{% set xs=1%}",
                "{% set x =( 1)|russet_bounded %}{% set xs=(1)|russet_bounded%}",
            ),
            ("{%-set x=a,b-%}", "{%-set x=(a,b)|russet_bounded-%}"),
            ("{%+ set n.x = '=|%}' +%}", "{%+ set n.x =( '=|%}')|russet_bounded_attribute +%}"),
            ("{% set\n(a, b) = c == d %}", "{% set\n(a, b) =( c == d)|russet_bounded %}"),
            ("{% set x %}{% endset %}", "{% set x %}{% endset %}"),
            ("{% set x | f(a=1) %}{% endset %}", "{% set x | f(a=1) %}{% endset %}"),
            ("{% settle x = 1 %}", "{% settle x = 1 %}"),
        ] {
            assert_eq!(rewrite(source, 100).as_deref(), Some(expected));
        }
    }

    #[test]
    fn no_assignment_hides_from_the_filter() {
        let assign = "{% set n.a = n %}";
        let filtered = "{% set n.a =( n)|russet_bounded_attribute %}";
        for hiding in [
            "{#}#}",
            "{#-#}",
            "{# {{ ' #}",
            "{{ {'a': {}} ~ '{% raw %}' }}",
            "{{ '\\'{% raw %}' }}",
            "{{ \"{#\" }}",
            "{% if {1:{}} %}",
            "{%+ if '%}' -%}",
            "{% raw %}{% endraw x %}{%- endraw +%}",
            "{ {%-raw-%}'{%endraw%}",
            "{{'{%'}}",
            "{{ [ '}}' , \"%}\" ] }}",
            "'\"{ ",
            "{{ x -}}",
            "{% set x | f('=') %}",
        ] {
            let end = " {# {% endraw %} #}";
            let found = rewrite(&format!("{hiding}{assign}{end}"), 100);
            assert_eq!(found, Some(format!("{hiding}{filtered}{end}")));
        }
        // Parentheses that would end the ones put around the value make it no valid source.
        for invalid in ["{% set n.a = n) or (1 %}", "{{ ) }}{% set n.a = n %}{{ ( }}"] {
            assert_eq!(rewrite(invalid, 100).as_deref(), Some(invalid));
        }
    }

    #[test]
    fn strings_comments_and_raw_blocks_are_left_alone() {
        for source in [
            "{{ '{% generation %}' }}",
            "{{ \"it's \\\" {% generation %}\" }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{%- raw -%}{{ '{% generation %}{%- endraw %}",
            "{% if x == '%}' %}{% endif %}",
            "{",
            "{{",
            "{%",
            "{#",
            "{% generation",
            "é{",
            "{{ '",
        ] {
            assert_eq!(rewrite(source, 100).as_deref(), Some(source));
        }
    }

    #[test]
    fn only_comments_and_text_may_be_long() {
        let long = "x".repeat(200);
        assert_eq!(rewrite(&format!("{{{{ {long} }}}}"), 100), None);
        assert_eq!(rewrite(&format!("{{% {long}"), 100), None);
        for source in [format!("{{# {long} #}}"), format!("{{% raw %}}{long}{{% endraw %}}"), long] {
            assert_eq!(rewrite(&source, 100), Some(source));
        }
    }
}
