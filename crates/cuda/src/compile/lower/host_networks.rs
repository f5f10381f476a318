//! Networks that the host has a part in: what it gets is sent, the card computes its own rows beside it, and the parts are joined.

use carat_model::{
    host_steps::HostNetwork,
    plan::{Step, Value},
    weights::Weight,
};

use super::Lowering;
use crate::{
    compile::fuse::{Epilogue, Experts, LinearPart, Op, Product, Prologue},
    kernel::{
        ExpertInput, ExpertsSum, Gemv, GemvEpilogue, GemvPrologue, GemvShape, GemvWeights,
        HostReceive, HostSend, HostStage, Operand, OutputRows, Overlap, RoutedExperts,
        WeightFormat, WeightOperand, fragment::FragmentFormat,
    },
};

/// A network of the list, with its sizes.
#[derive(Clone, Copy)]
struct Shared {
    index: usize,
    network: HostNetwork,
    columns: usize,
    inner: usize,
    outputs: usize,
    /// Of a mixture.
    route: Option<Operand>,
}

/// A dense network, from the op of gate and up to that of down.
#[derive(Clone, Copy)]
pub(super) struct Begun {
    shared: Shared,
    /// Whether the host has all it needs for its part of down.
    is_sent: bool,
}

impl Lowering<'_> {
    /// A product of a network that is shared: gate and up, or down.
    pub(super) fn host_product(&mut self, op: &Op, product: &Product) -> Option<()> {
        match (product.epilogue, product.parts.as_slice()) {
            (Epilogue::Geglu { out }, [gate, up]) => self.host_gated(op, product, (gate, up), out),
            (Epilogue::Nothing, [down]) => {
                let Prologue::Value(inner) = product.input else {
                    return None;
                };
                self.host_down(op, inner, *down)
            }
            _ => None,
        }
    }

    fn host_gated(
        &mut self,
        op: &Op,
        product: &Product,
        (gate, up): (&LinearPart, &LinearPart),
        out: Value,
    ) -> Option<()> {
        // Branches may not be summed yet.
        let joins = |input: &Prologue| match input {
            Prologue::ResidualNorm(joined) => joined.branches.is_some(),
            _ => false,
        };
        if joins(&product.input) {
            return None;
        }
        let down = self.only_reader(out)?;
        let shared = self.shared([gate.w, up.w, down.w], None, None)?;
        if shared.network.gated_from == shared.inner {
            let is_sent = false;
            self.begun.insert(out, Begun { shared, is_sent });
            return None;
        }
        let x = self.input_apart(op, |step| match step {
            Step::Linear { x, .. } => Some(*x),
            _ => None,
        })?;
        let is_sent = self.gated_parts(op, shared, x, Operand::Value(out));
        self.begun.insert(out, Begun { shared, is_sent });
        Some(())
    }

    fn host_down(&mut self, op: &Op, inner: Value, down: LinearPart) -> Option<()> {
        let Begun { shared, is_sent } = self.begun.remove(&inner)?;
        let inner = Operand::Value(inner);
        if shared.network.down_from == shared.outputs {
            return None;
        }
        if !is_sent {
            self.send(op, shared, HostStage::Down, (inner, shared.inner));
        }
        self.down_parts(op, shared, inner, Operand::Value(down.out));
        Some(())
    }

    /// Routed experts that are shared.
    pub(super) fn host_experts(&mut self, op: &Op, step: &Experts) -> Option<()> {
        let route = self.routes.get(&step.route).copied();
        let route = route.unwrap_or(Operand::Value(step.route));
        let top_k = self.plan.columns(step.route) / 2;
        let matrices = [step.gate, step.up, step.down];
        let shared = self.shared(matrices, Some(top_k), Some(route))?;
        let x = self.input_apart(op, |step| match step {
            Step::Experts { x, .. } => Some(*x),
            _ => None,
        })?;
        let inner = self.scratch_floats("host network inner", top_k * shared.inner);
        let is_sent = self.gated_parts(op, shared, x, inner);
        if !is_sent && shared.network.down_from < shared.outputs {
            let columns = top_k * shared.inner;
            self.send(op, shared, HostStage::Down, (inner, columns));
        }
        self.down_parts(op, shared, inner, Operand::Value(step.out));
        Some(())
    }

    /// The network of some matrices, as it is shared, on the list.
    fn shared(
        &mut self,
        matrices: [Weight; 3],
        top_k: Option<usize>,
        route: Option<Operand>,
    ) -> Option<Shared> {
        let format = |w: Weight| FragmentFormat::of(self.weights.matrix(w).quant);
        let [gate, up, down] = matrices.map(format);
        let in_parts = gate.is_some() && gate == up && down.is_some();
        let network = (self.host).network(self.weights, matrices, top_k, in_parts)?;
        self.host.list.push(network);
        Some(Shared {
            index: self.host.list.len() - 1,
            network,
            columns: self.weights.matrix(network.gate).columns,
            inner: self.weights.matrix(network.gate).rows,
            outputs: self.weights.matrix(network.down).rows,
            route,
        })
    }

    /// The steps of an op before the one that `of` knows, by their plain kernels; returns what that reads.
    fn input_apart(&mut self, op: &Op, of: impl Fn(&Step) -> Option<Value>) -> Option<Operand> {
        let steps = &self.plan.steps[op.steps.clone()];
        let (first, x) = (steps.iter().enumerate()).find_map(|(i, s)| Some((i, of(&s.step)?)))?;
        for labelled in &steps[..first] {
            self.step(labelled).ok()?;
        }
        self.settled = None;
        Some(Operand::Value(x))
    }

    fn number(&mut self) -> Operand {
        let bytes = super::ScratchBytes {
            per_row: 0,
            fixed: size_of::<u32>(),
        };
        self.scratch.operand("host request", bytes)
    }

    fn send(&mut self, op: &Op, shared: Shared, stage: HostStage, (x, columns): (Operand, usize)) {
        let kernel = HostSend {
            x,
            columns,
            route: shared.route.map(|route| (route, 2 * shared.network.each())),
            number: self.number(),
            network: shared.index,
            stage,
        };
        let what = match stage {
            HostStage::Gated | HostStage::Whole => "input to the host",
            HostStage::Down => "inner part to the host",
        };
        self.call(&format!("{} {what}", op.label), op.rows, kernel);
    }

    /// What gate and up give, of both sides. Returns whether the host has all it needs for its part of down. Where the whole network
    /// is the host's, nothing comes back yet.
    fn gated_parts(&mut self, op: &Op, shared: Shared, x: Operand, out: Operand) -> bool {
        let network = shared.network;
        let (each, own_rows) = (network.each(), network.gated_from);
        let host_rows = shared.inner - own_rows;
        let input = (x, shared.columns);
        if network.is_whole() {
            self.send(op, shared, HostStage::Whole, input);
            return true;
        }
        if host_rows > 0 {
            self.send(op, shared, HostStage::Gated, input);
        }
        let own = match host_rows {
            0 => out,
            _ => self.scratch_floats("host network own inner", each * own_rows),
        };
        if own_rows > 0 {
            let w = WeightOperand::interleaved(&[network.gate, network.up]);
            let epilogue = GemvEpilogue::Geglu { out: own, up: None };
            let sizes = (shared.columns, own_rows);
            self.own_part(op, shared, (x, w), sizes, epilogue);
        }
        let has_down = network.down_from < shared.outputs;
        if has_down {
            let own = (own, each * own_rows);
            self.send(op, shared, HostStage::Down, own);
        }
        if host_rows > 0 {
            let kernel = HostReceive {
                own: (own_rows > 0).then_some(own),
                columns: (own_rows, host_rows),
                each,
                out,
                number: self.number(),
                stage: HostStage::Gated,
                asked_behind: has_down,
            };
            let label = format!("{} inner part from the host", op.label);
            self.call(&label, op.rows, kernel);
        }
        has_down
    }

    /// What down gives, of both sides; the host has been asked.
    fn down_parts(&mut self, op: &Op, shared: Shared, inner: Operand, out: Operand) {
        let network = shared.network;
        let (each, own_rows) = (network.each(), network.down_from);
        let host_rows = shared.outputs - own_rows;
        let own = match host_rows {
            0 => out,
            _ => self.scratch_floats("host network own output", own_rows),
        };
        if own_rows > 0 {
            let product = match shared.route {
                Some(_) => self.scratch_floats("experts down", each * own_rows),
                None => own,
            };
            let part = OutputRows {
                out: product,
                first: 0,
                rows: own_rows,
            };
            let w = WeightOperand::one(network.down, WeightFormat::Fragments);
            let sizes = (shared.inner, own_rows);
            let epilogue = GemvEpilogue::Plain(vec![part]);
            self.own_part(op, shared, (inner, w), sizes, epilogue);
            if let Some(route) = shared.route {
                let kernel = ExpertsSum {
                    x: product,
                    route,
                    columns: own_rows,
                    top_k: each,
                    out: own,
                };
                self.call(&format!("{} sum", op.label), op.rows, kernel);
            }
        }
        if host_rows > 0 {
            let kernel = HostReceive {
                own: (own_rows > 0).then_some(own),
                columns: (own_rows, host_rows),
                each: 1,
                out,
                number: self.number(),
                stage: HostStage::Down,
                asked_behind: false,
            };
            self.call(&format!("{} from the host", op.label), op.rows, kernel);
        }
    }

    /// The card's rows of one matrix, or of gate and up.
    fn own_part(
        &mut self,
        op: &Op,
        shared: Shared,
        (x, w): (Operand, WeightOperand),
        (columns, outputs): (usize, usize),
        epilogue: GemvEpilogue,
    ) {
        let format = FragmentFormat::of(self.weights.matrix(w.parts[0]).quant);
        let format = format.expect("networks are shared in parts where they are in fragments");
        let pair = matches!(epilogue, GemvEpilogue::Geglu { .. });
        let kernel = Gemv {
            prologue: GemvPrologue::None { x },
            w,
            shape: GemvShape {
                weights: GemvWeights::Fragments(format),
                columns,
                outputs,
                pair,
                codes: false,
                top_k: shared.network.top_k,
                ready: false,
                // Gate and up read what a launch before has normed, and sums are those of the products that norm themselves.
                normed: pair,
                card: self.card(),
            },
            epilogue,
            routed: shared.route.map(|route| RoutedExperts {
                grouped: false,
                route,
                input: if pair {
                    ExpertInput::PerToken
                } else {
                    ExpertInput::PerExpert
                },
            }),
            pdl: false,
            overlap: Overlap::default(),
        };
        let what = if pair { "own inner part" } else { "own part" };
        self.call(&format!("{} {what}", op.label), op.rows, kernel);
    }
}
