//! A generator of broken requests: HTTP, JSON, types, sizes, UTF-8, nests, schemas.

use serde_json::{Value, json};

use super::{
    random::Random,
    wire::{chat, with},
};

/// A request that is wrong, as it goes over the wire.
pub(super) struct Broken {
    pub(super) kind: &'static str,
    pub(super) bytes: Vec<u8>,
    /// The client ends its half of the connection after it.
    pub(super) breaks_off: bool,
    /// It is so broken that there may be no answer, or an answer and no more.
    pub(super) may_close: bool,
}

impl Broken {
    /// For a report.
    pub(super) fn shown(&self) -> String {
        let beginning = &self.bytes[..self.bytes.len().min(600)];
        format!("{}: {}", self.kind, beginning.escape_ascii())
    }
}

const PATHS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/show",
    "/v1/embeddings",
];

pub(super) fn broken(random: &mut Random) -> Broken {
    match random.below(10) {
        0 => http(random),
        1 => head(random),
        2 => cut_json(random),
        3 => bytes_in_json(random),
        4 => nest(random),
        5 => size(random),
        6 => schema(random),
        _ => types(random),
    }
}

/// A request whose JSON is sent whole.
fn posted(kind: &'static str, path: &str, body: &[u8]) -> Broken {
    let mut bytes = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    Broken {
        kind,
        bytes,
        breaks_off: false,
        may_close: false,
    }
}

/// Requests that are no HTTP, or break off.
fn http(random: &mut Random) -> Broken {
    let body = valid(random).1.to_string();
    let length = body.len();
    let host = "host: localhost\r\ncontent-type: application/json\r\n";
    let path = random.pick(&PATHS);
    let noise: Vec<u8> = (0..=random.below(400))
        .map(|_| random.next() as u8)
        .collect();
    let text = match random.below(13) {
        0 => String::new(),
        1 => format!("POST {path}\r\n\r\n"),
        2 => format!("POST {path} HTTP/9.7\r\n{host}\r\n"),
        3 => format!("P\u{0}ST {path} HTTP/1.1\r\n{host}\r\n"),
        4 => format!("POST {path} HTTP/1.1\r\n{host}no colon here\r\n\r\n"),
        5 => format!("POST {path} HTTP/1.1\r\n{host}content-length: -5\r\n\r\n{body}"),
        6 => format!(
            "POST {path} HTTP/1.1\r\n{host}content-length: {length}\r\ncontent-length: 3\r\n\r\n{body}"
        ),
        7 => format!(
            "POST {path} HTTP/1.1\r\n{host}transfer-encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n"
        ),
        8 => format!(
            "POST {path} HTTP/1.1\r\n{host}transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{body}"
        ),
        9 => format!(
            "POST {path} HTTP/1.1\r\n{host}content-length: {}\r\n\r\n{body}",
            length + 1 + random.below(1000)
        ),
        10 => format!("POST {path} HTTP/1.1\r\n{host}content-len"),
        11 => format!(
            "POST {path} HTTP/1.1\r\n{host}transfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
        _ => format!("\r\n\r\n\r\nGET  /health  HTTP/1.1\r\n{host}\r\n"),
    };
    let bytes = if text.is_empty() {
        noise
    } else {
        text.into_bytes()
    };
    Broken {
        kind: "http",
        bytes,
        breaks_off: true,
        may_close: true,
    }
}

/// Proper HTTP with a head that is not taken.
fn head(random: &mut Random) -> Broken {
    let body = valid(random).1.to_string();
    let path = random.pick(&PATHS);
    let host = "host: localhost";
    let json = "content-type: application/json";
    let length = format!("content-length: {}", body.len());
    let (line, headers) = match random.below(9) {
        0 => (format!("POST {path}"), vec!["host: evil.example", json]),
        1 => (
            format!("POST {path}"),
            vec![host, json, "origin: https://evil.example"],
        ),
        2 => (format!("POST {path}"), vec![host, "content-type: text/xml"]),
        3 => (format!("DELETE {path}"), vec![host, json]),
        4 => ("POST /nowhere/at/all".to_owned(), vec![host, json]),
        5 => (format!("BREW {path}"), vec![host, json]),
        6 => (
            format!("POST {path}"),
            vec![host, json, "x-request-timeout: soon"],
        ),
        7 => (
            format!("POST {path}?{}", "a=%zz&".repeat(50)),
            vec![host, "content-type: \u{e9}"],
        ),
        _ => (
            format!("POST {path}"),
            vec![json, "host: localhost:99999999"],
        ),
    };
    let headers = headers.join("\r\n");
    let mut bytes = format!("{line} HTTP/1.1\r\n{headers}\r\n{length}\r\n");
    let may_close = match random.below(12) {
        0 => {
            bytes.push_str(&"x-more: y\r\n".repeat(101 + random.below(400)));
            true
        }
        1 => {
            bytes.push_str(&format!("x-long: {}\r\n", "y".repeat(70_000)));
            true
        }
        _ => false,
    };
    bytes.push_str("\r\n");
    bytes.push_str(&body);
    Broken {
        kind: "head",
        bytes: bytes.into_bytes(),
        breaks_off: false,
        // A body that is refused unread ends the connection.
        may_close: may_close || body.len() > 1 << 15,
    }
}

/// JSON that stops, goes on, or has a character too many.
fn cut_json(random: &mut Random) -> Broken {
    let (path, value) = valid(random);
    let mut body = value.to_string().into_bytes();
    match random.below(4) {
        0 => body.truncate(random.below(body.len())),
        1 => body.extend_from_slice(b"}]garbage"),
        2 => {
            let place = random.below(body.len());
            body.insert(place, random.pick(b"{}[]\",:\\\0-e"));
        }
        _ => {
            let place = random.below(body.len());
            body.remove(place);
        }
    }
    posted("cut JSON", path, &body)
}

/// Bytes that are no UTF-8, escapes that are no characters, numbers that are none.
fn bytes_in_json(random: &mut Random) -> Broken {
    let texts: [&[u8]; 11] = [
        b"\"\xff\xfe\"",
        b"\"\xc3\"",
        b"\"\xed\xa0\x80\"",
        b"\"\xf5\x80\x80\x80\"",
        b"\"\\ud800\"",
        b"\"\\udc00\\ud800\"",
        b"\"\\u12\"",
        b"\"\x00\x01\x02\"",
        b"1e999",
        b"-0.0e-99999999999999999999",
        b"NaN",
    ];
    let mut body =
        br#"{"model":"pip","max_tokens":2,"messages":[{"role":"user","content":"#.to_vec();
    body.extend_from_slice(random.pick(&texts));
    body.extend_from_slice(br#"}],"prompt":"#);
    body.extend_from_slice(random.pick(&texts));
    body.extend_from_slice(br#","input":"#);
    body.extend_from_slice(random.pick(&texts));
    body.push(b'}');
    posted("bytes", random.pick(&PATHS), &body)
}

fn nest(random: &mut Random) -> Broken {
    let depth = 1 + random.below(3000);
    let (open, close) = random.pick(&[("[", "]"), ("{\"a\":", "}"), ("[{\"b\":", "}]")]);
    let nest = format!("{}1{}", open.repeat(depth), close.repeat(depth));
    let (path, value) = valid(random);
    let body = match random.below(4) {
        0 => nest,
        1 => format!("{{\"messages\":{nest},\"input\":{nest},\"prompt\":{nest}}}"),
        2 => format!("{{\"ignored\":{nest},{}", &value.to_string()[1..]),
        _ => format!(
            "{{\"tools\":[{{\"type\":\"function\",\"function\":{{\"name\":\"f\",\"parameters\":{nest}}}}}],{}",
            &value.to_string()[1..]
        ),
    };
    posted("nest", path, body.as_bytes())
}

/// More than is taken of something.
fn size(random: &mut Random) -> Broken {
    let message = json!({"role": "user", "content": "x"});
    let more = match random.below(12) {
        0 => json!({ "n": 17 + random.below(1000) }),
        1 => json!({ "stop": vec!["s"; 17 + random.below(100)] }),
        2 => json!({ "stop": "s".repeat(257 + random.below(1000)) }),
        3 => json!({ "messages": vec![message; 10_001] }),
        4 => json!({ "top_logprobs": 21 + random.below(1 << 20), "logprobs": true }),
        5 => json!({ "max_tokens": -(random.below(100) as i64) - 2 }),
        6 => {
            let biases = (0..1025).map(|n| (n.to_string(), json!(1)));
            json!({ "logit_bias": biases.collect::<serde_json::Map<_, _>>() })
        }
        7 => json!({ "temperature": random.pick(&[-1.0, 1e30, 1e308]) }),
        8 => {
            let tool = json!({"type": "function", "function": {"name": "f"}});
            json!({ "tools": vec![tool; 257] })
        }
        9 => json!({ "messages": [{"role": "user", "content": "long ".repeat(5000)}] }),
        10 => json!({ "seed": u64::MAX, "top_k": i64::MIN, "top_p": -0.5 }),
        _ => json!({ "messages": [], "input": [], "prompt": [] }),
    };
    let body = with(chat("x", 2, random.below(2) == 0), &more).to_string();
    if random.below(50) == 0 {
        let large = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n{body}",
            random.pick(&PATHS)
        );
        return Broken {
            kind: "size",
            bytes: large.into_bytes(),
            breaks_off: true,
            may_close: true,
        };
    }
    posted("size", "/v1/chat/completions", body.as_bytes())
}

/// Schemas and grammars that cannot be held to, or say too much.
fn schema(random: &mut Random) -> Broken {
    let deep = (0..40).fold(
        json!({"type": "string"}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    );
    let schema = match random.below(14) {
        0 => json!({"type": "nonsense"}),
        1 => json!({"$ref": "#/$defs/missing"}),
        2 => json!({"$ref": "#"}),
        3 => json!({"$ref": "https://example.com/schema.json"}),
        4 => json!({"type": "string", "pattern": "((((("}),
        5 => json!({"type": "string", "pattern": "(a{1000}){1000}"}),
        6 => json!({"type": "string", "minLength": 9, "maxLength": 3}),
        7 => json!({"enum": []}),
        8 => json!({"type": "integer", "minimum": 5, "maximum": 1}),
        9 => json!({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        10 => deep,
        11 => json!({"type": "object", "properties": [1, 2], "required": "a"}),
        12 => json!(random.below(3)),
        _ => json!({"type": ["object", "array", "null", 7], "items": false, "not": {}}),
    };
    let more = match random.below(9) {
        0 => json!({"guided_json": schema}),
        1 => {
            json!({"guided_regex": random.pick(&["(", "[z-a]", "(?=x)y", "a{99999}", "\\p{Nope}"])})
        }
        2 => json!({"guided_choice": random.pick(&[&[][..], &[""], &["a", "a"]])}),
        3 => {
            json!({"grammar": random.pick(&["root ::=", "start: undefined", "%%%", "root ::= root", ""])})
        }
        4 => {
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"})
        }
        5 => json!({"response_format": {"type": "json_schema"}}),
        6 => json!({"response_format": {"type": "yaml", "schema": schema}}),
        _ => {
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}})
        }
    };
    let body = with(
        chat("x", 2, false),
        &with(more, &json!({"ignore_eos": false})),
    );
    posted(
        "schema",
        "/v1/chat/completions",
        body.to_string().as_bytes(),
    )
}

/// A good request with one value of another type.
fn types(random: &mut Random) -> Broken {
    let (path, mut body) = valid(random);
    let value = match random.below(11) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(1e308),
        4 => json!(""),
        5 => json!([]),
        6 => json!({}),
        7 => json!("\u{0}\u{202e}\u{10ffff}"),
        8 => json!([null, [{}], "x"]),
        9 => json!({"type": "text", "text": {"text": 3}}),
        _ => json!(u64::MAX),
    };
    replace(&mut body, value, random);
    posted("types", path, body.to_string().as_bytes())
}

/// Puts the value in some place.
fn replace(body: &mut Value, value: Value, random: &mut Random) {
    let stays = random.below(3) == 0;
    match body {
        Value::Object(map) if !stays && !map.is_empty() => {
            let place = random.below(map.len());
            if let Some(inner) = map.values_mut().nth(place) {
                replace(inner, value, random);
            }
        }
        Value::Array(list) if !stays && !list.is_empty() => {
            let place = random.below(list.len());
            replace(&mut list[place], value, random);
        }
        other => *other = value,
    }
}

/// A request that would be answered, and its path.
fn valid(random: &mut Random) -> (&'static str, Value) {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}]);
    let stream = random.below(2) == 0;
    match random.below(9) {
        0 => (
            "/v1/completions",
            json!({"prompt": ["a", "b"], "max_tokens": 2, "echo": true, "logprobs": 2, "stream": stream}),
        ),
        1 => (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
                "instructions": "i", "max_output_tokens": 4, "stream": stream, "text": {"format": {"type": "text"}},
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}),
        ),
        2 => (
            "/v1/messages",
            json!({"max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stream": stream,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}], "metadata": {"user_id": "u"}}),
        ),
        3 => (
            "/api/chat",
            json!({"model": "pip", "messages": [{"role": "user", "content": "x"}], "stream": stream,
                "options": {"num_predict": 2, "temperature": 0, "stop": ["x"]}, "format": "json"}),
        ),
        4 => (
            "/api/generate",
            json!({"model": "pip", "prompt": "x", "options": {"num_predict": 2}, "stream": stream}),
        ),
        5 => (
            "/tokenize",
            json!({"content": "a b c", "add_special": true, "with_pieces": true}),
        ),
        6 => ("/detokenize", json!({"tokens": [1, 2, 3]})),
        _ => (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": tools, "max_tokens": 2, "stream": stream, "n": 2,
                "stop": ["a", "b"], "logit_bias": {"5": 1}, "response_format": {"type": "text"},
                "stream_options": {"include_usage": true}, "seed": 1, "top_p": 0.5, "user": "u"}),
        ),
    }
}
