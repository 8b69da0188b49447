/// Replaces Transformers' `{% generation %} … {% endgeneration %}`, which marks the assistant's text for training, by
/// a `with` block: the same scope, the same whitespace rules, and no effect on the text. None if a tag is longer than
/// `max_tag` bytes.
pub(super) fn replace_generation_tags(source: &str, max_tag: usize) -> Option<String> {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        output.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|at| at + 2),
            Some(b'{') => end_of_code(tag, "}}"),
            Some(b'%') => end_of_code(tag, "%}"),
            _ => Some(1),
        }
        .unwrap_or(tag.len());
        let (tag, after) = tag.split_at(end);
        rest = after;
        if tag.len() > max_tag && !tag.starts_with("{#") {
            return None;
        }
        let Some(inner) = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")) else {
            output.push_str(tag);
            continue;
        };
        let word = inner.trim_matches(['-', '+']).trim();
        match word {
            "generation" => output.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => output.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => output.push_str(tag),
        }
        if word == "raw" {
            let end = end_of_raw(rest);
            output.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    output.push_str(rest);
    Some(output)
}

/// Where the code that begins with `{{` or `{%` ends, strings skipped.
fn end_of_code(tag: &str, close: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut index = 2;
    while let Some(&byte) = bytes.get(index) {
        match quote {
            Some(_) if byte == b'\\' => index += 1,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            None if bytes[index..].starts_with(close.as_bytes()) => return Some(index + close.len()),
            None => {}
        }
        index += 1;
    }
    None
}

/// Where the `{% endraw %}` of a raw block begins.
fn end_of_raw(text: &str) -> usize {
    text.match_indices("{%")
        .map(|(at, _)| at)
        .find(|at| text[at + 2..].trim_start_matches(['-', '+']).trim_start().starts_with("endraw"))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::replace_generation_tags;

    #[test]
    fn generation_tags_become_scopes_and_keep_their_whitespace_control() {
        for (source, expected) in [
            ("a{% generation %}b{% endgeneration %}c", "a{% with %}b{% endwith %}c"),
            ("{%- generation -%}x{%+ endgeneration -%}", "{%- with -%}x{%+ endwith -%}"),
            ("{%generation%}{%endgeneration%}", "{%with%}{%endwith%}"),
            ("{% set generation = 1 %}{{ generation }}", "{% set generation = 1 %}{{ generation }}"),
        ] {
            assert_eq!(replace_generation_tags(source, 100).as_deref(), Some(expected));
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
            assert_eq!(replace_generation_tags(source, 100).as_deref(), Some(source));
        }
    }

    #[test]
    fn only_comments_and_text_may_be_long() {
        let long = "x".repeat(200);
        assert_eq!(replace_generation_tags(&format!("{{{{ {long} }}}}"), 100), None);
        assert_eq!(replace_generation_tags(&format!("{{% {long}"), 100), None);
        for source in [format!("{{# {long} #}}"), format!("{{% raw %}}{long}{{% endraw %}}"), long] {
            assert_eq!(replace_generation_tags(&source, 100), Some(source));
        }
    }
}
