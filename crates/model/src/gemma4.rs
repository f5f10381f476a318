//! The forward pass of every Gemma 4 size, as a plan.
//!
//! Branches follow the file's contents (own or shared KV, experts, per-layer embeddings), never a size's name. The formulas
//! are those of the published model; pairs of norm and residual add stay apart here, and a backend joins what it likes.

use crate::{
    bind::{DenseFfn, Layer, Model, Moe, Ple, PleSlices},
    config::{Config, LayerKind},
    kv::KvGroup,
    phase::Section,
    plan::{Builder, KvSlot, Plan, Rope, RopeId, Rows, SlotSpec, Value},
};

/// Describes the forward pass of a bound model.
pub fn plan(m: &Model) -> Plan {
    let c = &m.config;
    let p = Builder::new(&m.weights);
    let ropes = rope_tables(&p, c, &m.rope_divisors, 0);
    let mut slots: Vec<KvSlot> = Vec::new();
    p.section(Section::Embed(Rows::All));
    let mut x = p.embed_input("token", m.embedding, (c.dim as f32).sqrt(), Rows::All);
    let mut ple = m
        .ple
        .as_ref()
        .map(|w| per_layer_inputs(&p, m, w, &w.front, x));

    for (i, l) in m.layers.iter().enumerate() {
        let facts = &c.layers[i];
        let rope = ropes(facts.kind);
        let head_norm = |name, x, weight| p.group_norm(name, x, weight, facts.head_dim, c.eps);
        p.section(Section::Attention(i));
        let mut h = p.norm("norm", x, l.attn_norm, c.eps);
        if let Some(w) = &l.own_kv {
            let slot = p.slot(slot_spec(c, i));
            slots.push(slot);
            let k = p.linear("k", h, w.k);
            let v = w.v.map_or(k, |v| p.linear("v", h, v)); // some full-attention layers reuse K as V
            let k = head_norm("k_norm", k, Some(w.k_norm));
            let k = p.rope("k_rope", k, rope);
            p.store_kv(k, head_norm("v_norm", v, None), slot);
        }
        if i + 1 == c.kv_layers {
            // No later layer writes KV, so rows that will not be sampled end here.
            x = p.select_sampled("select_stream", x);
            h = p.select_sampled("select_normed", h);
            ple = m.ple.as_ref().map(|w| {
                p.section(Section::Embed(Rows::Sampled));
                let scale = (c.dim as f32).sqrt();
                let embedded = p.embed_input("token", m.embedding, scale, Rows::Sampled);
                per_layer_inputs(&p, m, w, &w.tail, embedded)
            });
            p.section(Section::Attention(i));
        }
        let q = head_norm("q_norm", p.linear("q", h, l.q), Some(l.q_norm));
        let q = p.rope("q_rope", q, rope);
        let a = p.linear("o", p.attend(q, slots[facts.kv_source]), l.o);
        x = p.add("add", x, p.norm("post_norm", a, l.attn_post_norm, c.eps));

        p.section(Section::Ffn(i));
        let f = dense_ffn(&p, &l.ffn, x, c.eps);
        let f = match &l.moe {
            Some(moe) => with_experts(&p, c, moe, x, f),
            None => f,
        };
        x = p.add("add", x, p.norm("post_norm", f, l.ffn_post_norm, c.eps));
        if let Some(ple) = ple {
            p.section(Section::Ple(i));
            x = p.add("add", x, per_layer_branch(&p, m, l, i, x, ple));
        }
        if l.out_scale != 1.0 {
            x = p.scale("out_scale", x, l.out_scale);
        }
    }

    p.section(Section::Head);
    let hidden = p.norm("norm", x, m.output_norm, c.eps);
    let logits = p.linear("output", hidden, m.output);
    let logits = c.softcap.map_or(logits, |cap| p.softcap(logits, cap));
    p.finish(hidden, logits)
}

pub(crate) fn dense_ffn(p: &Builder<'_>, w: &DenseFfn, x: Value, eps: f32) -> Value {
    let h = p.norm("norm", x, w.norm, eps);
    let (gate, up) = (p.linear("gate", h, w.gate), p.linear("up", h, w.up));
    p.linear("down", p.gelu_mul("gelu_mul", gate, up, 0), w.down)
}

/// The dense branch `f` and the experts' branch, each under its own norm, summed. The router reads the residual stream
/// through a norm of its own.
fn with_experts(p: &Builder<'_>, c: &Config, w: &Moe, x: Value, f: Value) -> Value {
    let eps = c.eps;
    let routed = p.norm("router_norm", x, w.router_scale, eps);
    let routed = p.scale("router_scale", routed, 1.0 / (c.dim as f32).sqrt());
    let top_k = c.experts.map_or(1, |e| e.used);
    let route = p.route(routed, w.router, w.expert_scale, top_k);
    let h = p.norm("experts_norm", x, w.norm, eps);
    let experts = p.experts(h, route, [w.gate, w.up, w.down]);
    let dense = p.norm("dense_post_norm", f, w.dense_post_norm, eps);
    let experts = p.norm("experts_post_norm", experts, w.post_norm, eps);
    p.add("experts_add", dense, experts)
}

/// Inputs of some consecutive layers: what the token itself, and its embedding through a projection, give to them.
fn per_layer_inputs(
    p: &Builder<'_>,
    m: &Model,
    w: &Ple,
    slices: &PleSlices,
    embedded: Value,
) -> Value {
    let c = &m.config;
    let width = c.ple.unwrap_or(1);
    p.section(Section::PleInputs(p.rows(embedded)));
    let context = p.linear("proj", embedded, slices.projection);
    let context = p.scale("proj_scale", context, 1.0 / (c.dim as f32).sqrt());
    let context = p.group_norm("proj_norm", context, Some(w.norm), width, c.eps);
    let token = p.embed_like("token", slices.table, (width as f32).sqrt(), embedded);
    let sum = p.add("add", context, token);
    p.scale("add_scale", sum, std::f32::consts::FRAC_1_SQRT_2)
}

/// The per-layer gate reads the stream as it is, without a norm.
fn per_layer_branch(
    p: &Builder<'_>,
    m: &Model,
    l: &Layer,
    i: usize,
    x: Value,
    ple: Value,
) -> Value {
    let (Some(w), Some(all), Some(width)) = (&l.ple, &m.ple, m.config.ple) else {
        unreachable!("a model with per-layer inputs has them in every layer");
    };
    let slices = if i + 1 < m.config.kv_layers {
        &all.front
    } else {
        &all.tail
    };
    let column = (i - slices.first_layer) * width;
    let gated = p.gelu_mul("gelu_mul", p.linear("gate", x, w.gate), ple, column);
    let a = p.linear("proj", gated, w.projection);
    p.norm("post_norm", a, w.post_norm, m.config.eps)
}

fn slot_spec(c: &Config, i: usize) -> SlotSpec {
    let l = &c.layers[i];
    let (group, window) = match l.kind {
        LayerKind::Full => (KvGroup::Full, None),
        LayerKind::Sliding => (KvGroup::Sliding, Some(c.window)),
    };
    SlotSpec {
        group,
        kv_heads: l.kv_heads,
        head_dim: l.head_dim,
        window,
        borrowed: None,
    }
}

/// One table per kind of layer. Frequencies are computed in f64, so that far positions rotate by the right angle.
pub(crate) fn rope_tables(
    p: &Builder<'_>,
    c: &Config,
    divisors: &[f32],
    shift: usize,
) -> impl Fn(LayerKind) -> RopeId + use<> {
    let table = |kind: LayerKind, base: f32, divisors: &[f32]| {
        let head_dim = c.layers.iter().find(|l| l.kind == kind)?.head_dim;
        let frequencies = (0..head_dim / 2)
            .map(|j| {
                let frequency = f64::from(base).powf(-2.0 * j as f64 / head_dim as f64);
                (frequency / f64::from(divisors.get(j).copied().unwrap_or(1.0))) as f32
            })
            .collect();
        Some(p.rope_table(Rope {
            head_dim,
            frequencies,
            shift,
        }))
    };
    let full = table(LayerKind::Full, c.rope_base.full, divisors);
    let sliding = table(LayerKind::Sliding, c.rope_base.sliding, &[]);
    move |kind| {
        match kind {
            LayerKind::Full => full,
            LayerKind::Sliding => sliding,
        }
        .expect("a table exists for every kind of layer there is")
    }
}
