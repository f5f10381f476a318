//! A template is a program out of a file that anyone may have made. Whatever it does, rendering ends soon, in little
//! memory and with a sentence: never with an aborted process.
//!
//! The allocator of this test counts, per thread.

use std::{
    path::Path,
    sync::{Arc, LazyLock},
    time::Duration,
};

use carat_gguf::Gguf;
use carat_testkit::{
    allocation::{Counting, peak},
    work::worked,
};
use carat_text::{ChatTemplate, Message, RenderOptions, TextError, Tokenizer, Vocab};

/// Most memory alive at once in any attack. The bytes that are counted, at most three times over: a text grows into
/// memory of up to twice its size, and is copied once more when it becomes a value.
const MAX_BYTES: usize = 3 * (65 << 20);
const MAX_TIME: Duration = Duration::from_secs(2);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static VOCAB: LazyLock<Arc<Vocab>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pip-q8_0.gguf");
    let gguf = Gguf::open(&path).unwrap();
    Arc::clone(Tokenizer::from_metadata(gguf.metadata()).unwrap().vocab())
});

/// Result of a rendering, and the memory and time that it and the reading of the template took.
fn render(source: &str, messages: &[Message]) -> (Result<String, TextError>, usize, Duration) {
    LazyLock::force(&VOCAB);
    let start = worked();
    let (rendered, bytes) = peak(|| {
        ChatTemplate::new(source, &VOCAB)
            .and_then(|template| template.render(messages, &[], &RenderOptions::default()))
            .map(|rendered| rendered.text().into_owned())
    });
    let time = worked().saturating_sub(start);
    (rendered, bytes, time)
}

/// Runs attacks, each of which must end in an error that has one of `words` in it.
#[track_caller]
fn refused(words: &[&str], attacks: &[&str]) {
    for attack in attacks {
        let shown: String = attack.chars().take(120).collect();
        let (rendered, bytes, time) = render(attack, &[Message::user("x")]);
        match rendered {
            Ok(text) => panic!("{} bytes of text from {shown}", text.len()),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    words.iter().any(|word| error.contains(word)),
                    "{shown}: {error}"
                );
                assert!(
                    error.len() < 1000,
                    "{shown}: {} bytes of error",
                    error.len()
                );
            }
        }
        assert!(bytes <= MAX_BYTES, "{bytes} bytes for {shown}");
        assert!(time <= MAX_TIME, "{time:?} for {shown}");
    }
}

/// A loop of 100 rounds around `step`, with `ns.x` to work on.
fn repeated(start: &str, step: &str) -> String {
    format!("{{% set ns = namespace(x={start}) %}}{{% for i in range(100) %}}{step}{{% endfor %}}")
}

const BYTES: &[&str] = &["bytes of values"];
const STEPS: &[&str] = &["steps and may never end"];
const DEEP: &[&str] = &["nests lists or maps"];

#[test]
fn doubling_a_text_is_stopped() {
    for step in [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x * 2 %}",
        "{% set ns.x = 2 * ns.x %}",
        "{% set ns.x = ns.x | replace('a', 'aa') %}",
        "{% set ns.x = ns.x.replace('a', 'aa') %}",
        "{% set ns.x = ns.x | replace('', ns.x) %}",
        "{% set ns.x = [ns.x, ns.x] | join %}",
        "{% set ns.x = ns.x | join(ns.x) %}",
        "{% set ns.x = ns.x.join([ns.x, ns.x]) %}",
        "{% set ns.x = [ns.x, ns.x] | sum(start='') %}",
        "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}",
        "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        "{% set ns.x = [ns.x, ns.x] | string %}",
        "{% set ns.x = [ns.x, ns.x] | tojson %}",
        "{% set ns.x = [ns.x, ns.x] | tojson(indent=16) %}",
        "{% set ns.x = [ns.x, ns.x] | pprint %}",
        "{% set ns.x = [ns.x, ns.x] | upper %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
        "{% set ns.x %}{{ [ns.x, ns.x] }}{% endset %}",
        "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = m(ns.x) %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns.x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}",
        "{% set ns.x = ns.x ~ ns.x[::-1] %}",
    ] {
        refused(BYTES, &[&repeated("'aa'", step)]);
    }
}

#[test]
fn large_texts_from_little_are_stopped() {
    refused(
        BYTES,
        &[
            "{% set n = 100000000 %}{% for i in range(100) %}{{ 'a' * n }}{% endfor %}",
            "{% set n = 50000000 %}{% set l = namespace(x=[]) %}{% for i in range(100) %}{% set l.x = [l.x, 'a' * n] %}{% endfor %}",
            "{{ 'a\na' | indent(4000000000) }}",
            "{{ 'a\na' | indent(width=4000000000) }}",
            "{{ '%4000000000d' | format(1) }}",
            "{{ '%.4000000000f' | format(1.5) }}",
            "{{ '{:>4000000000}'.format('x') }}",
            "{{ '{:04000000000d}'.format(5) }}",
            "{{ [1] | batch(4000000000, 'x') }}",
            "{{ [1] | slice(4000000000) | list }}",
            "{% set n = 9000000 %}{{ fromjson('[' ~ '[],' * n ~ '[]]') }}",
            "{% set n = 90000000 %}{{ ('a' * n) | list }}",
            "{% set n = 90000000 %}{{ ('a ' * n).split() }}",
            "{% set n = 90000000 %}{{ ('\n' * n).splitlines() }}",
            "{% set n = 90000000 %}{{ ('\n' * n) | lines }}",
        ],
    );
    let raw = format!(
        "{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}",
        "a".repeat(100_000)
    );
    refused(BYTES, &[&raw]);
}

#[test]
fn constants_are_not_computed_into_large_ones() {
    refused(
        &["a constant of more than"],
        &[
            "{{ 'a' * 100000000 }}",
            "{{ 'a' * 10000 * 10000 }}",
            "{{ 10000 * ('a' * 10000) }}",
            "{{ ('a' * (10000 + 10000)) ~ ('a' * (10 ** 8)) }}",
            "{{ 'a' * (1 / 0.00000001) }}",
            "{% if 'b' in [1, 2] * 40000000 %}{% endif %}",
            "{% macro m(x='a' * 100000000) %}{% endmacro %}",
            "{{ x | default(['a'] * 99999999) }}",
            "{% for x in [1] * 99999999 if x == 'a' * 9999999 %}{% endfor %}",
        ],
    );
    // Numbers are numbers, however large.
    let (rendered, ..) = render("{{ 60 * 60 * 24 * 1000 + (2 + 3) * 1000000 }}", &[]);
    assert_eq!(rendered.unwrap(), "91400000");
    let (rendered, ..) = render("{{ '-' * 40 }}", &[]);
    assert_eq!(rendered.unwrap(), "-".repeat(40));
}

#[test]
fn growing_lists_are_stopped() {
    for step in [
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x * 2 %}",
        "{% set ns.x = (ns.x + ns.x) | list %}",
        "{% set ns.x = ns.x | chain(ns.x) %}",
        "{% set ns.x = ns.x + ns.x[::-1] %}",
        "{% set ns.x = ns.x | map('default', 1) | list + ns.x %}",
    ] {
        refused(BYTES, &[&repeated("[1]", step)]);
    }
    refused(
        BYTES,
        &[
            "{{ (range(100000) | list * 900) | list }}",
            "{{ (range(100000) | list * 900) | map('string') | list }}",
            "{{ (range(100000) | list * 900) | sort }}",
            "{{ 'a' in range(100000) | list * 900 }}",
            "{% set r = range(100000) | list %}{{ r | zip(r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r) }}",
        ],
    );
}

#[test]
fn deep_values_are_stopped() {
    for step in [
        "{% set ns.x = [ns.x] %}",
        "{% set ns.x = (ns.x, 1) %}",
        "{% set ns.x = {'a': ns.x} %}",
        "{% set ns.x = dict(a=ns.x) %}",
        "{% set ns.x = [ns.x] | batch(1) %}",
        "{% set ns.x = [ns.x] | slice(1) %}",
        "{% set ns.x = [[ns.x]] | map('list') | list %}",
        "{% set ns.x = [ns.x] | zip([1]) %}",
        "{% set ns.x = {'a': ns.x}.items() %}",
        "{% set ns.x = {'a': ns.x} | dictsort %}",
        "{% set ns.x = {'a': ns.x}.values() | list %}",
    ] {
        let deep = repeated("[1]", step).replace("range(100)", "range(100000)");
        refused(DEEP, &[&deep]);
    }
    // These make nothing deep, but the engine would build chains of them.
    for step in [
        "{% set ns.x = ns.x[0:] %}",
        "{% set ns.x = ns.x * 1 %}",
        "{% set ns.x = ns.x + [] %}",
        "{% set ns.x = ns.x | reverse %}",
        "{% set ns.x = ns.x | chain([]) %}",
    ] {
        let source = repeated("[1]", step).replace("range(100)", "range(50000)") + "{{ ns.x }}";
        let (rendered, bytes, _) = render(&source, &[]);
        assert_eq!(rendered.unwrap(), "[1]", "{step}");
        assert!(bytes <= MAX_BYTES, "{bytes} bytes for {step}");
    }
}

#[test]
fn shared_values_are_not_printed_or_compared_at_length() {
    let shared = repeated(
        "[1]",
        "{% if i < 60 %}{% set ns.x = [ns.x, ns.x] %}{% endif %}",
    );
    refused(BYTES, &[&shared]);
    // Twenty levels are a million items: allowed as a value, and paid for where it is used.
    let shared = repeated(
        "[1]",
        "{% if i < 14 %}{% set ns.x = [ns.x, ns.x] %}{% endif %}",
    );
    for uses in [
        "{{ ns.x }}",
        "{% set y = ns.x ~ '' %}",
        "{% set y = ns.x | tojson %}",
        "{% set y = ns.x | string %}",
        "{% if ns.x == [ns.x] %}{% endif %}",
        "{% if 1 in ns.x %}{% endif %}",
        "{% if ns.x is eq(ns.x) %}{% endif %}",
        "{% set y = [ns.x] | unique %}",
        "{% set y = [ns.x, ns.x] | sort %}",
        "{% set y = ns.x | upper %}",
        "{% set y = [1, 2] | select('eq', ns.x) %}",
    ] {
        refused(
            BYTES,
            &[&format!(
                "{shared}{{% for i in range(100000) %}}{uses}{{% endfor %}}"
            )],
        );
    }
}

#[test]
fn reading_a_long_text_again_and_again_is_stopped() {
    let text = "{% set n = 30000000 %}{% set x = 'a' * n %}{% set y = x ~ 'b' %}";
    for uses in [
        "{% if x == y[:-1] %}{% endif %}",
        "{% if 'b' in x %}{% endif %}",
        "{% if x is in([y]) %}{% endif %}",
        "{% if x is lower %}{% endif %}",
        "{% if x.startswith(x) %}{% endif %}",
        "{% set z = x[n - 1] %}",
        "{% set z = x[-1] %}",
        "{% set z = x | length %}",
        "{% set z = x.count('b') %}",
        "{% set z = x | int(0) %}",
        "{% for c in x %}{% break %}{% endfor %}",
        "{% for c in [x] recursive %}{% if c is string and loop.depth < 2 %}{{ loop(c) }}{% endif %}{% break %}{% endfor %}",
    ] {
        refused(
            BYTES,
            &[&format!(
                "{text}{{% for i in range(100000) %}}{uses}{{% endfor %}}"
            )],
        );
    }
}

#[test]
fn values_that_contain_themselves_are_refused() {
    refused(
        &["could then contain itself"],
        &[
            "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.a = {'n': ns} %}{{ ns | tojson }}",
            "{% set ns = namespace() %}{% set ns.a = dict(n=ns) %}{{ ns ~ '' }}",
            "{% set ns = namespace() %}{% set ns.a = [1] | map('default', ns, true) | list %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.a = [none] | batch(2, ns) %}{{ ns }}",
            "{% for i in [1] %}{{ loop.changed([loop]) }}{% endfor %}",
            "{% for i in [1] %}{{ loop.changed(loop) }}{% endfor %}",
        ],
    );
}

#[test]
fn endless_templates_end() {
    refused(
        STEPS,
        &[
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
            "{% macro m() %}{% for b in range(99999) %}{% endfor %}{% endmacro %}{% for a in range(99999) %}{{ m() }}{% endfor %}",
        ],
    );
    refused(
        &["bytes of values", "steps and may never end"],
        &[
            "{% for a in range(99999) %}{% for b in range(99999) %}{% macro m() %}{{ a }}{% endmacro %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set n = namespace(a=a) %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{{ range(100000) | map('string') | list | length }}{% endfor %}",
            "{% for a in range(99999) %}{{ range(100000) | sum }}{% endfor %}",
        ],
    );
    let (rendered, _, time) = render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", &[]);
    assert!(rendered.is_err() && time < MAX_TIME);
}

#[test]
fn templates_that_the_compiler_cannot_bear_are_refused() {
    let chains = [
        format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
        format!("{{{{ x{} }}}}", "~x".repeat(50_000)),
        format!("{{{{ x{} }}}}", "|e".repeat(50_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(50_000)),
        format!("{{{{ x{} }}}}", "[0]".repeat(50_000)),
        format!("{{{{ x{} }}}}", " is defined".repeat(50_000)),
        format!("{{{{ {} x }}}}", "not ".repeat(50_000)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(50_000)),
        "{% if x %}".repeat(50_000),
        "{{ (".to_owned() + &"(".repeat(50_000),
        "a".repeat(2 << 20),
    ];
    for chain in &chains {
        refused(&["the chat template cannot be"], &[chain]);
    }
    refused(&["unpacked"], &["{{ f(*x) }}", "{{ x | f(**x) }}"]);
    // The longest that are allowed must not exhaust the stack either.
    for chain in [
        format!("{{{{ 1{} }}}}", "+1".repeat(990)),
        format!("{{{{ x{} }}}}", "~x".repeat(990)),
        format!("{{{{ x{} }}}}", "|e".repeat(990)),
        format!("{{{{ {} x }}}}", "not ".repeat(1_990)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(499)),
    ] {
        let (_, _, time) = render(&chain, &[]);
        assert!(time < MAX_TIME, "{time:?}");
    }
}

#[test]
fn a_template_cannot_reach_the_meter() {
    for source in [
        "{{ [1000000000000] | map('<meter>') | list }}",
        "{{ [5] | map('+') | list }}",
        "{% include 'chat_template' %}",
        "{% import 'chat_template' as t %}",
        "{% extends 'chat_template' %}",
        "{{ debug() }}",
    ] {
        assert!(render(source, &[]).0.is_err(), "{source}");
    }
}

#[test]
fn messages_of_templates_are_cut_short() {
    let text = "{% set n = 9000000 %}{% set x = 'a' * n %}";
    for (word, uses) in [
        ("refuses", "{{ raise_exception(x) }}"),
        ("failed", "{% include x %}"),
    ] {
        refused(&[word], &[&format!("{text}{uses}")]);
    }
}

#[test]
fn odd_operands_do_not_panic() {
    for source in [
        "{{ 'abc'[0:2:-1] }}",
        "{{ [1, 2, 3][0:2:-1] }}",
        "{{ (1, 2, 3)[0:2:-1] }}",
        "{{ 'abc'[::-9223372036854775808] }}",
        "{{ [1, 2][::-9223372036854775808] }}",
        "{{ [1, 2][9223372036854775807:] }}",
        "{{ [1, 2][-9223372036854775808:] }}",
        "{{ [1, 2][:-9223372036854775808] }}",
        "{{ [1, 2][-9223372036854775808] }}",
        "{{ range(9223372036854775807, -9223372036854775807, -1) }}",
        "{{ range(-9223372036854775807, 9223372036854775807, 9223372036854775807) | list }}",
        "{{ 1 // 0 }}",
        "{{ 1 % 0 }}",
        "{{ -9223372036854775808 // -1 }}",
        "{{ 2 ** 200 }}",
        "{{ 1.5 | round(400) }}",
        "{{ 1.5 | round(-400) }}",
        "{{ '%c' | format(99999999999) }}",
        "{{ '%' | format(1) }}",
        "{{ '{' .format(1) }}",
        "{{ '{:é^5}'.format('x') }}",
        "{{ 'x' | indent(-1) }}",
        "{{ [1] | batch(0) }}",
        "{{ [1] | slice(0) }}",
        "{{ 'aé'[1:2] }}",
        "{{ 'é' | title }}",
        "{{ 'x'.replace('x', 'y', -5) }}",
        "{{ 'a b'.split(none, -9223372036854775808) }}",
        "{{ loop }}",
        "{{ namespace(1) }}",
        "{{ dict([1]) }}",
        "{% set a, b = [1] %}",
        "{% for a, b in [1] %}{% endfor %}",
        "{{ [] | min }}",
        "{{ {} | dictsort(by='x') }}",
        "{{ [{}] | groupby('x') }}",
        "{{ [1, 'a', none, []] | sort }}",
        "{{ super() }}",
        "{{ self.x() }}",
        "{{ caller() }}",
        "{{ 'x' | tojson(indent=99999999999999) }}",
        "{{ strftime_now('%Y') }}",
    ] {
        // Right or wrong, an answer.
        let _ = render(source, &[]);
    }
}
