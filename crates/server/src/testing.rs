//! Reader of answers for tests: a decoder of server-sent events, written after the WHATWG specification (9.2.6) and not after the
//! encoder. It uses nothing of this crate, so that integration tests can include the file.

/// One event of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SseEvent {
    /// `message` where the stream does not say.
    pub(crate) name: String,
    /// Lines of data, joined by line feeds.
    pub(crate) data: String,
    /// The latest id.
    pub(crate) id: String,
}

/// Takes bytes in pieces of any size, gives events.
#[derive(Default)]
pub(crate) struct SseDecoder {
    started: bool,
    /// A carriage return came last: a line feed after it belongs to it.
    returned: bool,
    line: Vec<u8>,
    name: String,
    data: String,
    id: String,
}

impl SseDecoder {
    /// Events that these bytes complete.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<SseEvent> {
        let mut events = Vec::new();
        for byte in bytes {
            let after_return = std::mem::take(&mut self.returned);
            match byte {
                b'\n' if after_return => {}
                b'\n' => events.extend(self.end_line()),
                b'\r' => {
                    self.returned = true;
                    events.extend(self.end_line());
                }
                other => self.line.push(*other),
            }
        }
        events
    }

    fn end_line(&mut self) -> Option<SseEvent> {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        let line = match line.strip_prefix('\u{feff}') {
            Some(rest) if !self.started => rest,
            _ => &line,
        };
        self.started = true;
        if line.is_empty() {
            return self.dispatch();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.name),
            "data" => {
                self.data.push_str(value);
                self.data.push('\n');
            }
            "id" if !value.contains('\0') => value.clone_into(&mut self.id),
            // Comments have no field name; unknown fields and `retry` change nothing here.
            _ => {}
        }
        None
    }

    fn dispatch(&mut self) -> Option<SseEvent> {
        let (name, mut data) = (
            std::mem::take(&mut self.name),
            std::mem::take(&mut self.data),
        );
        // An event without data is none, whatever its name.
        data.pop()?;
        let name = if name.is_empty() {
            "message".to_owned()
        } else {
            name
        };
        let id = self.id.clone();
        Some(SseEvent { name, data, id })
    }
}

/// The events of a whole stream.
pub(crate) fn sse(bytes: &[u8]) -> Vec<SseEvent> {
    SseDecoder::default().push(bytes)
}

/// Replaces what is random in a transcript, 24 characters after a known prefix, by dots.
pub(crate) fn without_ids(text: &str) -> String {
    const PREFIXES: [&str; 9] = [
        "chatcmpl-",
        "cmpl-",
        "resp_",
        "msg_",
        "rs_",
        "fc_",
        "call_",
        "toolu_",
        "req_",
    ];
    const LENGTH: usize = 24;
    let mut rest = text;
    let mut out = String::with_capacity(text.len());
    'text: while let Some(first) = rest.chars().next() {
        for prefix in PREFIXES {
            let Some(tail) = rest.strip_prefix(prefix) else {
                continue;
            };
            let id = tail.bytes().take_while(u8::is_ascii_alphanumeric).count();
            if id == LENGTH {
                out.push_str(prefix);
                out.push_str("...");
                rest = &tail[LENGTH..];
                continue 'text;
            }
        }
        out.push(first);
        rest = &rest[first.len_utf8()..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, data: &str) -> SseEvent {
        SseEvent {
            name: name.to_owned(),
            data: data.to_owned(),
            id: String::new(),
        }
    }

    #[test]
    fn examples_of_the_specification_read_as_it_says() {
        assert_eq!(
            sse(b"data: YHOO\ndata: +2\ndata: 10\n\n"),
            [event("message", "YHOO\n+2\n10")]
        );
        let stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n";
        let first = SseEvent {
            id: "1".to_owned(),
            ..event("message", "first event")
        };
        // The third is never completed by a blank line.
        assert_eq!(sse(stream), [first, event("message", "second event")]);
        assert_eq!(
            sse(b"data\n\ndata\ndata\n\ndata:"),
            [event("message", ""), event("message", "\n")]
        );
        assert_eq!(
            sse(b"data:test\n\ndata: test\n\n"),
            [event("message", "test"), event("message", "test")]
        );
    }

    #[test]
    fn every_line_end_and_every_split_read_the_same() {
        let stream =
            "\u{feff}event: a\r\ndata: \u{e9}\r\r\n: nothing\nevent: lost\n\nevent: b\ndata: 2\n\n";
        let expected = [event("a", "\u{e9}"), event("b", "2")];
        let bytes = stream.as_bytes();
        for split in 0..=bytes.len() {
            let mut decoder = SseDecoder::default();
            let mut events = decoder.push(&bytes[..split]);
            events.extend(decoder.push(&bytes[split..]));
            assert_eq!(events, expected, "split at {split}");
        }
    }
}
