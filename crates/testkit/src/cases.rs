//! Every step as a tiny plan of its own: what a backend must agree on with the reference, format by format.
//!
//! A case embeds random tokens, runs the step under test and hands the rows over. Inputs are table rows, which backends
//! gather exactly, so an error belongs to the step alone.

use std::{ops::Range, sync::Arc};

use carat_gguf::{
    Gguf, QuantType,
    quant::SplitMix64,
    writer::{Writer, write_tensor},
};
use carat_model::{
    TokenId,
    backend::{Backend, BackendError, Batching, CompileOptions, Feed, Outputs},
    evaluate::{self, Evaluation},
    kv::{KvGroup, KvType},
    plan::{Builder, Plan, Rope, Rows, SlotSpec, Step, Value},
    reference::Reference,
    sampling::random,
    weights::{Weight, Weights},
};

use crate::close;

/// Largest distance of a step from the reference, as relative L2 error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Gathers, copies, sums: no rounding to differ in.
    Exact,
    /// Sums and elementary functions in f32.
    Float,
    /// 16-bit keys and values.
    HalfKv,
    /// 8-bit keys and values in groups of 32.
    EightBitKv,
    /// 8-bit activations in blocks of 32 against quantized weights: the class of every engine that multiplies integers.
    EightBit,
    /// Two such products, one after the other.
    EightBitTwice,
}

impl Bound {
    pub fn relative_l2(self) -> f64 {
        match self {
            Bound::Exact => 0.0,
            Bound::Float => 2e-6,
            Bound::HalfKv => 1e-3,
            Bound::EightBitKv => 1e-2,
            Bound::EightBit => 6e-3,
            Bound::EightBitTwice => 1.4e-2,
        }
    }

    /// The bound for a result of `count` elements. Rounding errors of a few elements scatter more than their mean, and twice as much
    /// where all elements of a row share those of the product between.
    fn for_count(self, count: usize) -> f64 {
        let scatter = 1.0 / (count as f64).sqrt();
        match self {
            Bound::EightBit => self.relative_l2() * (1.0 + 2.0 * scatter),
            Bound::EightBitTwice => self.relative_l2() * (1.0 + 4.0 * scatter),
            Bound::Exact | Bound::Float | Bound::HalfKv | Bound::EightBitKv => self.relative_l2(),
        }
    }
}

/// One step, its data and the batches it is run in.
pub struct Case {
    pub name: String,
    pub bound: Bound,
    plan: Plan,
    weights: Arc<Weights>,
    tokens: Vec<TokenId>,
    chunk: usize,
    /// Places whose rows see each other both ways, and are fed these embeddings where the plan takes any.
    spans: Vec<Range<usize>>,
    embeddings: Vec<f32>,
    kv: KvType,
    checked: Value,
    /// Root mean square that such results have over many draws of the data.
    typical: Option<f64>,
}

impl Case {
    /// Takes the size of results from the matrix `w`: its inputs have deviation 1.
    fn with_typical(mut self) -> Case {
        let w = self.weights.find("w").expect("a product has a matrix");
        let matrix = self.weights.matrix(w);
        let mut row = vec![0.0; matrix.columns];
        let mut squares = 0.0;
        for r in 0..matrix.rows {
            matrix.quant.dequantize(self.weights.row(w, 0, r), &mut row);
            squares += close::squares(&row);
        }
        self.typical = Some((squares / matrix.rows as f64).sqrt());
        self
    }

    /// The checked value after every batch, one after another.
    pub fn values(&self, backend: &dyn Backend) -> Result<Vec<f32>, BackendError> {
        let options = CompileOptions {
            kv: self.kv.into(),
            probe: true,
            batching: Batching::Fast,
            ..evaluate::options(self.tokens.len(), self.longest_chunk())
        };
        let mut executor = backend.compile(&self.plan, Arc::clone(&self.weights), &options)?;
        let mut evaluation = Evaluation::new(executor.as_mut(), &self.plan, options.pages);
        let (mut values, mut outputs) = (Vec::new(), Outputs::default());
        let feeds = self.feeds();
        let mut start = 0;
        while start < self.tokens.len() {
            let end = self.chunk_end(start);
            let visible = self.visible_end(start..end);
            evaluation.feed(
                &feeds[start..end],
                start..end,
                visible.as_deref(),
                &mut outputs,
            )?;
            let last = evaluation.executor().probed(self.checked);
            values.extend_from_slice(last.expect("compiled to be probed"));
            start = end;
        }
        Ok(values)
    }

    fn feeds(&self) -> Vec<Feed<'_>> {
        let width = self.plan.input_width().unwrap_or(0);
        let mut rows = self.embeddings.chunks_exact(width.max(1));
        let feed = |(place, token): (usize, &TokenId)| match self.span_of(place) {
            Some(_) if width > 0 => Feed::Embedding {
                row: rows.next().expect("a row for each place in a span"),
                token: *token,
            },
            _ => Feed::Token(*token),
        };
        self.tokens.iter().enumerate().map(feed).collect()
    }

    fn span_of(&self, place: usize) -> Option<&Range<usize>> {
        self.spans.iter().find(|span| span.contains(&place))
    }

    fn longest_chunk(&self) -> usize {
        self.chunk + self.spans.iter().map(Range::len).max().unwrap_or(0)
    }

    /// A chunk further, or to the end of the span that this would cut.
    fn chunk_end(&self, start: usize) -> usize {
        let end = self.tokens.len().min(start + self.chunk);
        match self.span_of(end) {
            Some(span) if span.start < end => span.end,
            _ => end,
        }
    }

    /// Rows of a span see each other.
    fn visible_end(&self, rows: Range<usize>) -> Option<Vec<u32>> {
        let end = |place: usize| self.span_of(place).map_or(place + 1, |span| span.end) as u32;
        (!self.spans.is_empty()).then(|| rows.map(end).collect())
    }

    /// With rows that see each other both ways, fed embeddings where the plan takes any.
    fn with_spans(mut self, spans: &[Range<usize>]) -> Case {
        let width = self.plan.input_width().unwrap_or(0);
        let values = spans.iter().map(Range::len).sum::<usize>() * width;
        let mut random = SplitMix64::new(5);
        self.embeddings = (0..values).map(|_| random.gauss()).collect();
        self.spans = spans.to_vec();
        self
    }

    /// Runs the case on a backend and says how it differs from the reference, if it does.
    pub fn check(&self, backend: &dyn Backend) -> Result<(), String> {
        let expected = self.values(&Reference).map_err(|e| e.to_string())?;
        let found = self.values(backend).map_err(|e| e.to_string())?;
        if let Some(at) = expected.iter().position(|x| !x.is_finite()) {
            return Err(format!(
                "the reference itself gives {} at {at}",
                expected[at]
            ));
        }
        let mut error = close::relative_l2(&found, &expected);
        if let Some(typical) = self.typical {
            // A sum that happens to cancel must not make its rounding look large.
            let root_mean_square = |x: &[f32]| (close::squares(x) / x.len() as f64).sqrt();
            error *= root_mean_square(&expected) / root_mean_square(&expected).max(typical);
        }
        let allowed = self.bound.for_count(expected.len());
        if error <= allowed {
            return Ok(());
        }
        Err(format!(
            "relative error {error:.2e}, at most {allowed:.1e} allowed"
        ))
    }
}

const VOCAB: usize = 96;

/// Random tensors in memory, then a plan over them.
struct Bench {
    writer: Writer,
    data: Vec<u8>,
    seed: u64,
}

impl Bench {
    fn new(seed: u64) -> Bench {
        Bench {
            writer: Writer::default(),
            data: Vec::new(),
            seed,
        }
    }

    fn tensor(mut self, name: &str, shape: &[usize], quant: QuantType) -> Bench {
        let bytes = self.writer.tensor(name, shape, quant);
        let mut blocks = vec![0; bytes];
        self.seed += 1;
        carat_gguf::quant::random_blocks(quant, self.seed, 1.0, &mut blocks);
        write_tensor(&mut self.data, &blocks).expect("memory takes it");
        self
    }

    /// Finishes a case. `build` returns the value to check; every row of it is selected at the end.
    fn case(
        self,
        name: String,
        bound: Bound,
        (tokens, chunk): (usize, usize),
        build: impl FnOnce(&Builder<'_>, &dyn Fn(&str) -> Weight) -> Value,
    ) -> Case {
        let mut file = Vec::new();
        self.writer.write_head(&mut file).expect("memory takes it");
        file.extend_from_slice(&self.data);
        let file = Gguf::from_bytes(&name, file).expect("the writer writes what the reader reads");
        let weights = Weights::of_file(Arc::new(file));
        let builder = Builder::new(&weights);
        let checked = build(&builder, &|name| weights.find(name).expect("written above"));
        let rows = builder.select_sampled("checked", checked);
        let plan = builder.finish(rows, rows);
        Case {
            name,
            bound,
            plan,
            tokens: (0..tokens as u64)
                .map(|i| (random(self.seed, i, 1) % VOCAB as u64) as TokenId)
                .collect(),
            weights: Arc::new(weights),
            chunk,
            spans: Vec::new(),
            embeddings: Vec::new(),
            kv: KvType::default(),
            checked,
            typical: None,
        }
    }
}

/// Exactness to which a product with weights of this format can be reproduced.
fn product_bound(quant: QuantType) -> Bound {
    if quant.is_float() {
        Bound::Float
    } else {
        Bound::EightBit
    }
}

fn embeds() -> impl Iterator<Item = Case> {
    QuantType::all().map(|quant| {
        Bench::new(1).tensor("table", &[512, VOCAB], quant).case(
            format!("embed/{quant}"),
            Bound::Exact,
            (9, 9),
            |p, w| p.embed("table", w("table"), 3.0, Rows::All),
        )
    })
}

/// Rows in place of tokens: as they are where the plan takes its input, and not where it looks something else up.
fn embeddings() -> impl Iterator<Item = Case> {
    [QuantType::F32, QuantType::Q8_0]
        .into_iter()
        .flat_map(|quant| {
            let bench = || {
                Bench::new(2).tensor("table", &[64, VOCAB], quant).tensor(
                    "other",
                    &[64, VOCAB],
                    quant,
                )
            };
            let spans = [1..3, 5..6];
            let input = bench().case(
                format!("embed_input/{quant}"),
                Bound::Exact,
                (9, 4),
                |p, w| p.embed_input("table", w("table"), 3.0, Rows::All),
            );
            let other = bench().case(
                format!("embed_input/beside/{quant}"),
                Bound::Exact,
                (9, 9),
                |p, w| {
                    let input = p.embed_input("table", w("table"), 3.0, Rows::All);
                    p.add("add", input, p.embed("other", w("other"), 2.0, Rows::All))
                },
            );
            [input, other].map(|case| case.with_spans(&spans))
        })
}

fn linears() -> impl Iterator<Item = Case> {
    let shapes = [(256, 1), (256, 37), (512, 64), (768, 130), (2048, 48)];
    let rows = [1, 2, 3, 7, 33];
    QuantType::all().flat_map(move |quant| {
        shapes.into_iter().flat_map(move |(columns, outputs)| {
            rows.into_iter().map(move |rows| {
                Bench::new(rows as u64)
                    .tensor("table", &[columns, VOCAB], QuantType::F32)
                    .tensor("w", &[columns, outputs], quant)
                    .case(
                        format!("linear/{quant}/{columns}x{outputs}/rows{rows}"),
                        product_bound(quant),
                        (rows, rows),
                        |p, w| p.linear("w", p.embed("table", w("table"), 1.0, Rows::All), w("w")),
                    )
                    .with_typical()
            })
        })
    })
}

fn experts() -> impl Iterator<Item = Case> {
    QuantType::all().flat_map(|quant| {
        [1, 2, 19, 40].into_iter().map(move |rows| {
            Bench::new(rows as u64)
                .tensor("table", &[256, VOCAB], QuantType::F32)
                .tensor("router", &[256, 6], QuantType::F32)
                .tensor("scale", &[6], QuantType::F32)
                .tensor("gate", &[256, 256, 6], quant)
                .tensor("up", &[256, 256, 6], quant)
                .tensor("down", &[256, 192, 6], quant)
                .case(
                    format!("experts/{quant}/rows{rows}"),
                    if quant.is_float() {
                        Bound::Float
                    } else {
                        Bound::EightBitTwice
                    },
                    (rows, rows),
                    |p, w| {
                        let x = p.embed("table", w("table"), 0.1, Rows::All);
                        let route = p.route(x, w("router"), Some(w("scale")), 2);
                        p.experts(x, route, [w("gate"), w("up"), w("down")])
                    },
                )
        })
    })
}

fn attention() -> impl Iterator<Item = Case> {
    let shapes = [
        (4, 4, 32, None, 70, 70),
        (4, 2, 64, None, 70, 1),
        (8, 1, 64, Some(33), 120, 17),
        (8, 1, 64, Some(33), 120, 1),
        (16, 1, 128, None, 40, 40),
        (8, 2, 256, Some(64), 130, 130),
        (8, 2, 256, Some(64), 130, 31),
        (8, 2, 512, None, 70, 23),
        (2, 1, 16, Some(1), 40, 8),
        (3, 1, 24, Some(1000), 45, 45),
        (8, 1, 64, None, 700, 256),
        (8, 1, 64, None, 600, 1),
    ];
    let plain = shapes.into_iter().map(attention_case);
    // Spans shorter and longer than the window, side by side, across pages; in full-attention layers they change nothing.
    let both_ways = [
        (
            (8, 1, 64, Some(33), 120, 17),
            vec![(3, 20), (40, 47), (47, 50), (60, 110)],
        ),
        (
            (4, 2, 32, Some(8), 90, 90),
            vec![(1, 30), (31, 32), (40, 75)],
        ),
        (
            (8, 2, 256, Some(64), 130, 1),
            vec![(5, 12), (30, 35), (100, 110)],
        ),
        ((4, 4, 32, None, 70, 9), vec![(10, 40)]),
        ((4, 2, 32, Some(200), 300, 64), vec![(100, 260)]),
    ];
    let both_ways = both_ways.map(|(shape, spans)| {
        let spans: Vec<_> = spans.into_iter().map(|(start, end)| start..end).collect();
        let case = attention_case(shape).with_spans(&spans);
        Case {
            name: case.name.replace("attend/", "attend_both_ways/"),
            ..case
        }
    });
    plain.chain(both_ways)
}

/// Query heads, KV heads, head size, window, tokens, chunk.
type AttentionShape = (usize, usize, usize, Option<usize>, usize, usize);

fn attention_case((heads, kv_heads, head_dim, window, tokens, chunk): AttentionShape) -> Case {
    let label = window.map_or("full".to_owned(), |w| format!("window{w}"));
    Bench::new(head_dim as u64)
        .tensor("q", &[heads * head_dim, VOCAB], QuantType::F32)
        .tensor("k", &[kv_heads * head_dim, VOCAB], QuantType::F32)
        .tensor("v", &[kv_heads * head_dim, VOCAB], QuantType::F32)
        .case(
            format!("attend/{heads}h{kv_heads}kv{head_dim}/{label}/tokens{tokens}/chunk{chunk}"),
            Bound::HalfKv,
            (tokens, chunk),
            |p, w| {
                let slot = p.slot(SlotSpec {
                    group: if window.is_some() {
                        KvGroup::Sliding
                    } else {
                        KvGroup::Full
                    },
                    kv_heads,
                    head_dim,
                    window,
                    borrowed: None,
                });
                // Scores of the size a trained model has: the softmax is neither flat nor an arg max.
                let scale = 1.5 / (head_dim as f32).sqrt();
                let embed = |name| p.embed(name, w(name), 1.0, Rows::All);
                p.store_kv(embed("k"), embed("v"), slot);
                p.attend(p.embed("q", w("q"), scale, Rows::All), slot)
            },
        )
}

fn elementwise() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [1, 5] {
        let table = |columns: usize| {
            Bench::new(7)
                .tensor("table", &[columns, VOCAB], QuantType::F32)
                .tensor("weight", &[columns.min(64)], QuantType::F32)
        };
        let name = |step: &str| format!("{step}/rows{rows}");
        let size = (rows, rows);
        cases.push(
            table(192).case(name("norm/weighted"), Bound::Float, size, |p, w| {
                p.group_norm(
                    "norm",
                    p.embed("table", w("table"), 2.0, Rows::All),
                    Some(w("weight")),
                    64,
                    1e-6,
                )
            }),
        );
        cases.push(
            table(200).case(name("norm/plain"), Bound::Float, size, |p, w| {
                p.group_norm(
                    "norm",
                    p.embed("table", w("table"), 2.0, Rows::All),
                    None,
                    200,
                    1e-6,
                )
            }),
        );
        cases.push(
            table(128).case(name("rope"), Bound::Float, (60, rows), |p, w| {
                let frequencies = (0..32).map(|j| 1e4f32.powf(-(j as f32) / 32.0)).collect();
                let rope = p.rope_table(Rope {
                    head_dim: 64,
                    frequencies,
                    shift: 0,
                });
                p.rope("rope", p.embed("table", w("table"), 1.0, Rows::All), rope)
            }),
        );
        cases.push(
            table(96).case(name("gelu_mul"), Bound::Float, size, |p, w| {
                let wide = p.embed("table", w("table"), 3.0, Rows::All);
                p.gelu_mul("gelu_mul", p.scale("scale", wide, 1.7), wide, 0)
            }),
        );
        cases.push(table(96).tensor("slim", &[32, VOCAB], QuantType::F32).case(
            name("gelu_mul/slice"),
            Bound::Float,
            size,
            |p, w| {
                let gate = p.embed("slim", w("slim"), 2.0, Rows::All);
                p.gelu_mul(
                    "gelu_mul",
                    gate,
                    p.embed("table", w("table"), 1.0, Rows::All),
                    40,
                )
            },
        ));
        cases.push(table(100).case(name("add"), Bound::Exact, size, |p, w| {
            let x = p.embed("table", w("table"), 1.0, Rows::All);
            p.add("add", x, p.scale("scale", x, 0.3))
        }));
        cases.push(
            table(100).case(name("softcap"), Bound::Float, size, |p, w| {
                p.softcap(p.embed("table", w("table"), 20.0, Rows::All), 30.0)
            }),
        );
        cases.push(table(64).tensor("router", &[64, 9], QuantType::F32).case(
            name("route"),
            Bound::Float,
            size,
            |p, w| {
                p.route(
                    p.embed("table", w("table"), 0.2, Rows::All),
                    w("router"),
                    None,
                    3,
                )
            },
        ));
    }
    cases
}

/// Every case there is.
pub fn all() -> Vec<Case> {
    let mut cases: Vec<Case> = embeds().collect();
    cases.extend(embeddings());
    cases.extend(linears());
    cases.extend(experts());
    cases.extend(attention());
    cases.extend(elementwise());
    cases
}

/// Attention over keys and values in Q8_0, for backends that have them.
pub fn eight_bit_kv() -> impl Iterator<Item = Case> {
    attention().map(|case| Case {
        name: case.name.replace("attend", "attend_q8_0"),
        bound: Bound::EightBitKv,
        kv: KvType::Q8_0,
        ..case
    })
}

/// Step kinds the cases cover, for a test that none is forgotten. Those of drafters alone, `state` and `cluster_logits`, are checked
/// by [`crate::drafting`]: a plain batch has no states.
pub fn covered_steps() -> Vec<&'static str> {
    let mut names: Vec<&str> = all()
        .iter()
        .flat_map(|c| c.plan.steps.iter().map(|s| Step::name(&s.step)))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_step_is_covered() {
        let expected = [
            "add",
            "attend",
            "embed",
            "experts",
            "gelu_mul",
            "linear",
            "norm",
            "rope",
            "route",
            "scale",
            "select_sampled",
            "softcap",
            "store_kv",
        ];
        assert_eq!(covered_steps(), expected);
    }

    #[test]
    fn the_reference_agrees_with_itself() {
        for case in elementwise() {
            assert_eq!(case.check(&Reference), Ok(()), "{}", case.name);
        }
    }
}
