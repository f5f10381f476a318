//! Random schemas of the kinds that are supported.

use serde_json::{Map, Value, json};

use super::Random;

const NAMES: [&str; 12] = [
    "a",
    "b",
    "name",
    "city",
    "name_2",
    "naïve",
    "x y",
    "type",
    "id",
    "city-code",
    "items",
    "q\"",
];

/// A schema whose JSON, and whose values, are nested a few levels.
pub(crate) fn schema(random: &mut Random, depth: usize) -> Value {
    let kinds = if depth == 0 { 9 } else { 13 };
    match random.below(kinds) {
        0 => json!({"type": "string"}),
        1 => string(random),
        2 => integer(random),
        3 => number(random),
        4 => json!({"type": "boolean"}),
        5 => json!({"type": "null"}),
        6 => json!({"enum": constants(random)}),
        7 => json!({"const": constants(random)[0]}),
        8 => json!({"type": ["string", "null"], "maxLength": 5}),
        9 => array(random, depth),
        10 | 11 => object(random, depth),
        _ => {
            let count = 1 + random.below(3);
            let branches: Vec<_> = (0..count).map(|_| schema(random, depth - 1)).collect();
            json!({"anyOf": branches})
        }
    }
}

fn string(random: &mut Random) -> Value {
    let patterns = [
        "^[a-c]{2,4}$",
        "^\\d+$",
        "x",
        "^(yes|no)$",
        "[A-Z]",
        "^a|b$",
        "^[^,]*$",
    ];
    let formats = ["date", "date-time", "time", "uuid", "ipv4"];
    match random.below(4) {
        0 => json!({"type": "string", "minLength": random.below(4)}),
        1 => {
            json!({"type": "string", "minLength": random.below(3), "maxLength": 3 + random.below(20)})
        }
        2 => json!({"type": "string", "pattern": random.pick(&patterns)}),
        _ => json!({"type": "string", "format": random.pick(&formats)}),
    }
}

fn integer(random: &mut Random) -> Value {
    let low = random.below(2000) as i64 - 1000;
    match random.below(5) {
        0 => json!({"type": "integer"}),
        1 => json!({"type": "integer", "minimum": low}),
        2 => json!({"type": "integer", "maximum": low}),
        3 => json!({"type": "integer", "multipleOf": 1 + random.below(9)}),
        _ => {
            json!({"type": "integer", "exclusiveMinimum": low, "maximum": low + 1 + random.below(300) as i64})
        }
    }
}

fn number(random: &mut Random) -> Value {
    let low = random.below(2000) as f64 / 8.0 - 100.0;
    match random.below(4) {
        0 => json!({"type": "number"}),
        1 => json!({"type": "number", "minimum": low}),
        2 => json!({"type": "number", "exclusiveMaximum": low}),
        _ => {
            json!({"type": "number", "minimum": low, "maximum": low + 0.5 + random.below(100) as f64})
        }
    }
}

fn constants(random: &mut Random) -> Vec<Value> {
    let all = [
        json!("red"),
        json!("dark \"red\"\n"),
        json!(""),
        json!("日本 ▁"),
        json!(1),
        json!(-2.5),
        json!(null),
        json!(true),
        json!([1, "a"]),
        json!({"a": {"b c": []}}),
    ];
    let count = 1 + random.below(4);
    (0..count).map(|_| random.pick(&all).clone()).collect()
}

fn array(random: &mut Random, depth: usize) -> Value {
    let mut array = json!({"type": "array", "items": schema(random, depth - 1)});
    let least = random.below(3);
    if random.one_in(2) {
        array["minItems"] = json!(least);
    }
    if random.one_in(2) {
        array["maxItems"] = json!(least + random.below(4));
    }
    if random.one_in(4) {
        let firsts: Vec<_> = (0..=random.below(2))
            .map(|_| schema(random, depth - 1))
            .collect();
        array["prefixItems"] = json!(firsts);
        if random.one_in(2) {
            array["items"] = json!(false);
            array["minItems"] = json!(random.below(firsts.len() + 1));
            array["maxItems"] = json!(firsts.len());
        }
    }
    array
}

/// An object that names its keys, or one of any keys.
pub(crate) fn object(random: &mut Random, depth: usize) -> Value {
    if depth > 0 && random.one_in(8) {
        return json!({"type": "object", "additionalProperties": schema(random, depth - 1)});
    }
    let mut properties = Map::new();
    for _ in 0..random.below(6) {
        let name = *random.pick(&NAMES);
        properties.insert(name.to_owned(), schema(random, depth.saturating_sub(1)));
    }
    let names: Vec<_> = properties.keys().cloned().collect();
    let required: Vec<_> = names.iter().filter(|_| random.one_in(2)).collect();
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    if random.one_in(4) {
        object["additionalProperties"] = schema(random, 0);
    } else if random.one_in(2) {
        object["additionalProperties"] = json!(false);
    }
    object
}

/// An object that may hold more of its kind.
pub(crate) fn recursive(random: &mut Random) -> Value {
    json!({
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": schema(random, 0),
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value"],
                "additionalProperties": false,
            },
        },
        "type": "object",
        "properties": {"list": {"$ref": "#/$defs/node"}, "all": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "required": ["list"],
    })
}
