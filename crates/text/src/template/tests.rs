use serde_json::{Value as Json, json};

use super::*;

fn render(source: &str) -> Result<String, Error> {
    render_with(source, &json!({}))
}

fn render_with(source: &str, variables: &Json) -> Result<String, Error> {
    ChatTemplate::new("test", source)?.render(variables.as_object().unwrap())
}

fn is_stopped(result: Result<String, Error>) -> bool {
    matches!(result, Err(Error::TemplateLimit { limit: Limit::Work, .. }))
}

#[test]
fn endless_work_ends_with_the_fuel() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    assert!(is_stopped(render(loops)));
    let printing = "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}";
    assert!(is_stopped(render(printing)));
    let doubling =
        "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}";
    assert!(is_stopped(render(doubling)));
    let scanning =
        "{% set s = 'x' * 1000000 %}{% for a in range(100000) %}{% set b = s.find('y') %}{% endfor %}";
    assert!(is_stopped(render(scanning)));
    assert!(is_stopped(render("{{ 'x'.center(99999999999) }}")));
    assert!(is_stopped(render("{{ 'x'.ljust(99999999999) }}")));
    let indented = "{% set n = namespace(v=1) %}{% for a in range(900) %}{% set n.v = [n.v] %}{% endfor %}\
                    {% for a in range(100000) %}{% set s = n.v | tojson(indent=64) %}{% endfor %}";
    assert!(is_stopped(render(indented)));
}

/// A value that contains itself 2^40 times, in 40 small lists.
const BOMB: &str = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}\
                    {% set n.b = [n.b, n.b] %}{% endfor %}";

#[test]
fn a_value_that_repeats_itself_ends_with_the_fuel() {
    for expression in ["n.a", "n.a ~ ''", "n.a == n.b", "n.a | tojson", "{n.a: 1}"] {
        assert!(is_stopped(render(&format!("{BOMB}{{{{ {expression} }}}}"))), "{expression}");
    }
    // Built without assignments.
    let recursive = "{% macro m(x, d) %}{% if d %}{{ m([x, x], d - 1) }}{% else %}{{ EXPRESSION }}{% endif %}\
                     {% endmacro %}{{ m(1, 40) }}";
    for expression in ["x", "x | tojson", "x | string", "[x]"] {
        assert!(is_stopped(render(&recursive.replace("EXPRESSION", expression))), "{expression}");
    }
}

#[test]
fn a_value_cannot_contain_itself() {
    for value in ["n", "[n]", "{'k': [n]}", "namespace(m=n)", "(1, n)", "[n] | list"] {
        let error = render(&format!("{{% set n = namespace() %}}{{% set n.a = {value} %}}{{{{ n ~ '' }}}}"))
            .unwrap_err();
        assert!(error.to_string().contains("a namespace cannot be assigned"), "{value}: {error}");
    }
    assert_eq!(render("{% set n = namespace(a=1) %}{% set m = n %}{% set n.a = 2 %}{{ m.a }}").unwrap(), "2");
}

#[test]
fn what_fuel_does_not_pay_for_ends_with_the_time_and_is_not_tried_again() {
    let source = "{% macro m(x, y, d) %}{% if d %}{{ m([x, x], [y, y], d - 1) }}{% else %}{{ x == y }}{% endif %}\
                  {% endmacro %}{{ m(1, 1, 40) }}";
    let template = ChatTemplate::new("test", source).unwrap();
    let is_late = |result| matches!(result, Err(Error::TemplateLimit { limit: Limit::Time, .. }));
    assert!(is_late(template.render_within(Duration::from_millis(300), &Map::new())));
    let start = std::time::Instant::now();
    assert!(is_late(template.render(&Map::new())));
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn recursion_ends_in_an_error() {
    for source in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a(x) %}{{ b([x]) }}{% endmacro %}{% macro b(x) %}{{ a([x]) }}{% endmacro %}{{ a(1) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ] {
        assert!(matches!(render(source), Err(Error::TemplateRender { .. })), "{source}");
    }
}

#[test]
fn deep_source_does_not_exhaust_the_stack() {
    // As much as fits into the size limits. That they end is what counts; most are refused.
    let nested = |open: &str, middle: &str, close: &str| {
        let limit = if open.starts_with('{') { MAX_SOURCE_BYTES } else { MAX_TAG_BYTES };
        let count = (limit - 100) / (open.len() + close.len());
        format!("{}{middle}{}", open.repeat(count), close.repeat(count))
    };
    for source in [
        format!("{{{{ {} }}}}", nested("(", "1", ")")),
        format!("{{{{ {} }}}}", nested("[", "1", "]")),
        format!("{{{{ {} }}}}", nested(" {1:", "1", "}")),
        format!("{{{{ {} }}}}", nested("-", "1", "")),
        format!("{{{{ {} }}}}", nested("not ", "1", "")),
        format!("{{{{ 1{} }}}}", nested("+1", "", "")),
        format!("{{{{ 1{} }}}}", nested("~1", "", "")),
        format!("{{{{ 1{} }}}}", nested("**1", "", "")),
        format!("{{{{ x{} }}}}", nested(".x", "", "")),
        format!("{{{{ x{} }}}}", nested("()", "", "")),
        format!("{{{{ x{} }}}}", nested("[0]", "", "")),
        format!("{{{{ x{} }}}}", nested("|e", "", "")),
        format!("{{{{ {} }}}}", nested("1 if 1 else ", "1", "")),
        format!("{{% set {} = 1 %}}", nested("(", "a", ")")),
        format!("{{% if 1 %}}{}{{% endif %}}", nested("{% elif 1 %}", "", "")),
        nested("{% if 1 %}", "", "{% endif %}"),
        nested("{% for x in y %}", "", "{% endfor %}"),
        nested("{% filter upper %}", "", "{% endfilter %}"),
        nested("{% generation %}", "", "{% endgeneration %}"),
    ] {
        let _ = render(&source);
    }
    assert_eq!(render(&format!("{{{{ 1{} }}}}", "+1".repeat(2000))).unwrap(), "2001");
}

#[test]
fn deep_values_do_not_exhaust_the_stack() {
    let assigned = "{% set n = namespace(v=1) %}{% for a in range(2000) %}{% set n.v = [n.v] %}{% endfor %}";
    assert!(render(assigned).unwrap_err().to_string().contains("nested more than 1000 levels"));
    // As deep as recursive macros go, with as many brackets as the parser takes.
    let (open, close) = ("[".repeat(60), "]".repeat(60));
    let with = |expression: &str| {
        render(&format!(
            "{{% macro m(x, d) %}}{{% if d %}}{{{{ m({open}x{close}, d - 1) }}}}{{% else %}}{{{{ {expression} }}}}\
             {{% endif %}}{{% endmacro %}}{{{{ m(1, 80) }}}}"
        ))
    };
    assert_eq!(with("(x ~ '') | length").unwrap(), "9601", "the values are no longer as deep as meant");
    for expression in ["x", "x | tojson", "x == [x]", "[x, [x]] | sort", "{x: 1}"] {
        let _ = with(expression);
    }
}

#[test]
fn deep_messages_are_refused() {
    let nested = |depth: usize| (0..depth).fold(json!(1), |value, _| Json::Array(vec![value]));
    assert_eq!(render_with("{{ x | string | length }}", &json!({"x": nested(100)})).unwrap(), "201");
    let error = render_with("{{ x | length }}", &json!({"x": nested(MAX_DEPTH + 1)})).unwrap_err();
    assert!(error.to_string().contains("`x` is nested more than 129 levels"), "{error}");
    let mut variables = Map::new();
    variables.insert("x".to_owned(), nested(5000));
    assert!(ChatTemplate::new("test", "{{ x | length }}").unwrap().render(&variables).is_err());
}

#[test]
fn a_template_that_is_too_large_is_refused() {
    let error = render(&" ".repeat(MAX_SOURCE_BYTES + 1)).unwrap_err();
    assert!(matches!(error, Error::TemplateLimit { limit: Limit::Source, .. }));
    assert!(error.to_string().contains("131072 bytes of source"), "{error}");
}

#[test]
fn a_long_expression_is_refused() {
    let error = render(&format!("{{{{ 1{} }}}}", "~1".repeat(MAX_TAG_BYTES / 2))).unwrap_err();
    assert!(matches!(error, Error::TemplateLimit { limit: Limit::Tag, .. }));
}

#[test]
fn errors_say_what_is_wrong_and_where() {
    let error = render("line one\n{% if %}").unwrap_err();
    assert!(matches!(&error, Error::TemplateSyntax { message, .. } if message.contains("line 2")), "{error}");
    let error = render("\n\n{{ zz.foo.bar }}").unwrap_err();
    assert!(matches!(&error, Error::TemplateRender { message, .. } if message.contains("line 3")), "{error}");
    let error = render("{% macro m() %}{{ raise_exception('Only ' ~ 'users!') }}{% endmacro %}{{ m() }}")
        .unwrap_err();
    assert!(matches!(&error, Error::TemplateRaised { message, .. } if message == "Only users!"), "{error}");
    assert!(render("{{ strftime_now('%Q%!') }}").is_err());
    for missing in [
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{{ debug() }}",
        "{{ x | pprint }}",
    ] {
        assert!(render(missing).is_err(), "{missing}");
    }
}

#[test]
fn the_caller_may_have_a_small_stack() {
    let small = std::thread::Builder::new().stack_size(64 << 10);
    let text = small
        .spawn(|| render("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}x{% endmacro %}{{ f(50) }}"));
    assert_eq!(text.unwrap().join().unwrap().unwrap().len(), 51);
}

#[test]
fn time_is_written_as_asked() {
    let text = render("{{ strftime_now('%Y-%m-%d|%d %b %Y|%H:%M|%-d|%%|%A') }}").unwrap();
    let parts: Vec<_> = text.split('|').collect();
    assert_eq!(parts.len(), 6, "{text}");
    assert_eq!((parts[0].len(), parts[1].len(), parts[2].len(), parts[4]), (10, 11, 5, "%"), "{text}");
    assert!(parts[5].ends_with("day"), "{text}");
}

#[test]
fn generation_tags_are_tolerated() {
    let source = "{% for m in ['a', 'b'] %}\n  {%- generation %}\n{{ m }}{{ loop.index }}\n  {% endgeneration %}\n{% endfor %}";
    assert_eq!(render(source).unwrap(), "a1\nb2\n");
}

proptest::proptest! {
    #[test]
    fn no_source_panics_or_hangs(
        pieces in proptest::collection::vec(
            proptest::sample::select(vec![
                "{{", "}}", "{%", "%}", "{#", "#}", "-", " ", "\n", "if", "endif", "for", "in", "endfor", "set", "x", "=",
                "(", ")", "[", "]", "{", "}", "'", "\"", "\\", ".", "|", "tojson", "raw", "endraw", "generation",
                "endgeneration", "macro", "endmacro", "1", "é", "~", ",", ":", "namespace", "x.split('')", "loop",
            ]),
            0..30,
        ),
    ) {
        let _ = render_with(&pieces.concat(), &json!({"x": [1, "a"]}));
        let _ = render_with(&pieces.join(" "), &json!({"x": "text"}));
    }
}
