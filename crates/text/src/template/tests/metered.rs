//! The meter changes no result: templates with it and without.

use super::*;

/// The engine's own rendering of a template, without a meter.
fn plain(source: &str, context: &serde_json::Map<String, Value>) -> String {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.unwrap());
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.render_str(source, Serde(context)).unwrap()
}

fn metered(source: &str, context: &serde_json::Map<String, Value>) -> String {
    let limits = TemplateLimits::for_conversation(&[], &[]).unwrap();
    let rendered = template(source).run(minijinja::Value::from(Serde(context)), &limits);
    rendered.unwrap_or_else(|error| panic!("{source}: {error}"))
}

#[test]
fn published_templates_render_as_the_engine_does() {
    let asking = Message {
        thinking: "need tools".to_owned(),
        ..with_calls(
            "Let me see.",
            vec![
                call(
                    "get_weather",
                    json!({"city": "Paris", "Exact": [1, null, {"a": false}]}),
                ),
                call("now", json!("{}")),
            ],
        )
    };
    let chat = [
        Message::system("Be brief."),
        Message::user(" w? "),
        asking,
        Message::tool_result("{\"temp\": 15}"),
        Message::tool_result("noon"),
        Message::assistant("Sunny."),
        Message::user("thanks"),
    ];
    for source in [GEMMA_31B, GEMMA_31B_INTERLEAVED, FALLBACK] {
        let habits = Habits::of(source);
        for messages in (2..=chat.len()).flat_map(|end| [&chat[..end], &chat[1..end]]) {
            for tools in [&[][..], &[weather_tool()]] {
                let mut context = context(messages, tools, habits, None);
                context.insert("enable_thinking".to_owned(), tools.is_empty().into());
                context.insert("add_generation_prompt".to_owned(), true.into());
                assert_eq!(metered(source, &context), plain(source, &context));
            }
        }
    }
}

#[test]
fn checks_change_no_result() {
    let json = json!({
        "list": [1, "b", [2.5, null], {"k": "v"}], "text": "häuser & <b>", "map": {"z": 1, "a": {"b": [true]}}, "n": 3,
        "rows": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 1, "b": "z"}],
    });
    let context = json.as_object().unwrap();
    for source in [
        "{{ text ~ n ~ list ~ map ~ none ~ 1.5 ~ missing }}",
        "{{ n + 1 }} {{ 1 + n }} {{ text + text }} {{ list + [1] }} {{ (1, 2) + (n,) }} {{ 1.5 + n }}",
        "{{ text * n }} {{ n * text }} {{ [n] * 3 }} {{ (n,) * 2 }} {{ n * 2.5 }} {{ n * n }}",
        "{{ text[1:] }}|{{ text[:-2] }}|{{ text[::-1] }}|{{ text[1:6:2] }}|{{ text[n] }}|{{ text[-1] }}|{{ text[99:] }}",
        "{{ list[1:] }}|{{ list[:-1] }}|{{ list[::-1] }}|{{ list[::2] }}|{{ list[n] }}|{{ list[-1] }}|{{ list[9:] }}",
        "{{ list[1:][0] }} {{ list[1:][-1] }} {{ list[1:] is sequence }} {{ list[1:] is iterable }} {{ list[1:] | length }}",
        "{{ list[1:] == list[1:] }} {{ [list[1:]] }} {{ list[1:] ~ '' }} {{ list[9:] or 'none' }} {{ list[1:][1:] }}",
        "{{ (1, 2, 3)[1:] }} {{ (1, 2, 3)[::-1] }} {{ none[1:] }} {{ missing[1:] }}",
        "{{ list + list == list * 2 }} {{ (list + list)[5] }} {{ (list + [n]) | last }} {{ ([1] * 3) | first }}",
        "{{ n == 3 }} {{ list == list }} {{ text < 'z' }} {{ 1 < n <= 3 }} {{ 'b' in list }} {{ 'ser' in text }} {{ 'z' in map }}",
        "{{ n is divisibleby(3) }} {{ text is eq(text) }} {{ 'A' is upper }} {{ n is in([3]) }} {{ list is sequence }}",
        "{{ range(5) | list }} {{ range(1, 4)[1] }} {{ range(5, 1, -2) }} {{ range(3) | length }} {{ range(0) or 'none' }}",
        "{{ range(3) == range(3) }} {{ range(4) | join('-') }} {{ range(4) | reverse | list }} {{ range(9)[2:4] | list }}",
        "{% for i in range(3) %}{{ loop.index }}{{ loop.last }}{{ loop.previtem }}{{ loop.changed(i) }}{% endfor %}",
        "{% for i in list[1:] if i is not mapping %}{{ i }};{% else %}none{% endfor %}",
        "{% for i in [[1, [2]], [3]] recursive %}{% if i is sequence %}({{ loop(i) }}){% else %}{{ i }}{% endif %}{% endfor %}",
        "{% for k, v in map | dictsort %}{{ k }}={{ v }};{% endfor %}{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}",
        "{% macro m(a, b='d', c=[1]) %}{{ a }}{{ b }}{{ c }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{{ m(1, c=2) }}{% call m(3) %}x{% endcall %}",
        "{% set x %}a{{ n }}{% endset %}{{ x ~ x }}{% filter upper %}q{{ text }}{% endfilter %}",
        "{% set ns = namespace(a=1, l=[]) %}{% for i in range(4) %}{% set ns.a = ns.a + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.a }}{{ ns.l }}{{ ns.l[2] }}{{ ns }}",
        "{% set a, b = [1, [2]] %}{{ a }}{{ b }}{% with c = a + 1 %}{{ c }}{% endwith %}{{ dict(a=1, b=[2]) }}{{ {'a': n, 'b': [n]} }}",
        "{{ text | upper }} {{ text | title }} {{ text | escape }} {{ text | replace('h', 'HH') }} {{ text.replace('ä', 'ae') }} {{ ' x ' | trim }}",
        "{{ list | join(',') }} {{ ','.join(['a', 'b']) }} {{ text.split() }} {{ 'a,b,c' | split(',', 1) | list }} {{ 'a\nb'.splitlines() }}",
        "{{ 'a\nb' | indent(2, true) }} {{ '%s-%03d' | format('x', 7) }} {{ '{:>5}|{}'.format('x', 1) }} {{ 'x' | string }} {{ list | string }}",
        "{{ rows | map(attribute='a') | list }} {{ rows | selectattr('a', 'eq', 1) | map(attribute='b') | join }} {{ rows | groupby('a') }}",
        "{{ [3, 1, 2] | sort }} {{ [3, 1, 2] | sort(reverse=true) }} {{ [1, 1, 2] | unique | list }} {{ [1, 2, 3] | batch(2, 0) | list }}",
        "{{ [1, 2, 3] | slice(2) | list }} {{ [1, 2] | zip([3, 4]) | list }} {{ [1] | chain([2]) | list }} {{ [1, 2] | sum }} {{ [1, 2] | max }}",
        "{{ missing | default('d') }} {{ '' | default('d', true) }} {{ list | first }} {{ list | last }} {{ '7' | int + 1 }} {{ 2.567 | round(1) }}",
        "{{ map.get('z') }} {{ map.get('q', 5) }} {{ map.keys() | list }} {{ map.values() | list }} {{ map.a.b[0] }} {{ map['a']['b'] }}",
        "{{ 'a' if n else 'b' }} {{ missing or text }} {{ not list }} {{ n and 5 }} {{ -n }} {{ n // 2 }} {{ n % 2 }} {{ n ** 2 }} {{ n / 2 }}",
        "{% block b %}in{{ n }}{% endblock %}{{ self.b() }} {% autoescape 'html' %}{{ text }}{% endautoescape %} {% raw %}{{ n }}{% endraw %}",
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i ~ '' }}{% endfor %}",
    ] {
        let expected = plain(source, context);
        assert_eq!(metered(source, context), expected, "{source}");
    }
}
