//! The forward pass of every Gemma 4 size, as a plan.
//!
//! Branches follow the file's contents (own or shared KV, experts, per-layer embeddings), never a size's name. The formulas
//! are those of the published model; pairs of norm and residual add stay apart here, and a backend joins what it likes.

use crate::{
    bind::{DenseFfn, Layer, Model, Moe, Ple, PleSlices},
    config::{Config, LayerKind},
    kv::KvGroup,
    plan::{Builder, KvSlot, Plan, Rope, RopeId, Rows, SlotSpec, Value},
};

pub fn plan(m: &Model) -> Plan {
    let c = &m.config;
    let p = Builder::new(&m.weights);
    let ropes = rope_tables(&p, m);
    let mut slots: Vec<KvSlot> = Vec::new();
    p.section("embed");
    let mut x = p.embed(m.embedding, (c.dim as f32).sqrt(), Rows::All);
    let mut ple = m
        .ple
        .as_ref()
        .map(|w| per_layer_inputs(&p, m, w, &w.front, x));

    for (i, l) in m.layers.iter().enumerate() {
        let facts = &c.layers[i];
        let rope = ropes(facts.kind);
        p.section(format!("L{i}.attn"));
        let mut h = p.norm(x, l.attn_norm, c.eps);
        let rows_end = i + 1 == c.kv_layers;
        // Beside keys and values, so that a backend can join the three, unless rows end in between.
        let q = (!rows_end).then(|| p.linear(h, l.q));
        if let Some(w) = &l.own_kv {
            let slot = p.slot(slot_spec(c, i));
            slots.push(slot);
            let k = p.linear(h, w.k);
            let v = w.v.map_or(k, |v| p.linear(h, v)); // some full-attention layers reuse K as V
            let k = p.rope(p.group_norm(k, Some(w.k_norm), facts.head_dim, c.eps), rope);
            p.store_kv(k, p.group_norm(v, None, facts.head_dim, c.eps), slot);
        }
        if rows_end {
            // No later layer writes KV, so rows that will not be sampled end here.
            (x, h) = (p.narrow(x), p.narrow(h));
            ple = m.ple.as_ref().map(|w| {
                let embedded = p.embed(m.embedding, (c.dim as f32).sqrt(), Rows::Sampled);
                per_layer_inputs(&p, m, w, &w.tail, embedded)
            });
        }
        let q = q.unwrap_or_else(|| p.linear(h, l.q));
        let q = p.rope(p.group_norm(q, Some(l.q_norm), facts.head_dim, c.eps), rope);
        let a = p.linear(p.attend(q, slots[facts.kv_source]), l.o);
        x = p.add(x, p.norm(a, l.attn_post_norm, c.eps));

        p.section(format!("L{i}.ffn"));
        let f = dense_ffn(&p, &l.ffn, x, c.eps);
        let f = match &l.moe {
            Some(moe) => with_experts(&p, c, moe, x, f),
            None => f,
        };
        x = p.add(x, p.norm(f, l.ffn_post_norm, c.eps));
        if let Some(ple) = ple {
            p.section(format!("L{i}.ple"));
            x = p.add(x, per_layer_branch(&p, m, l, i, x, ple));
        }
        if l.out_scale != 1.0 {
            x = p.scale(x, l.out_scale);
        }
    }

    p.section("head");
    let hidden = p.norm(x, m.output_norm, c.eps);
    let logits = p.linear(hidden, m.output);
    let logits = c.softcap.map_or(logits, |cap| p.softcap(logits, cap));
    p.finish(hidden, logits)
}

fn dense_ffn(p: &Builder<'_>, w: &DenseFfn, x: Value, eps: f32) -> Value {
    let h = p.norm(x, w.norm, eps);
    p.linear(
        p.gelu_mul(p.linear(h, w.gate), p.linear(h, w.up), 0),
        w.down,
    )
}

/// The dense branch `f` and the experts' branch, each under its own norm, summed. The router reads the residual stream
/// through a norm of its own.
fn with_experts(p: &Builder<'_>, c: &Config, w: &Moe, x: Value, f: Value) -> Value {
    let eps = c.eps;
    let dense = p.norm(f, w.dense_post_norm, eps);
    let routed = p.scale(p.norm(x, w.router_scale, eps), 1.0 / (c.dim as f32).sqrt());
    let top_k = c.experts.map_or(1, |e| e.used);
    let route = p.route(routed, w.router, w.expert_scale, top_k);
    let experts = p.experts(p.norm(x, w.norm, eps), route, [w.gate, w.up, w.down]);
    p.add(dense, p.norm(experts, w.post_norm, eps))
}

/// What the token itself, and its embedding through a projection, give to some consecutive layers.
fn per_layer_inputs(
    p: &Builder<'_>,
    m: &Model,
    w: &Ple,
    slices: &PleSlices,
    embedded: Value,
) -> Value {
    let c = &m.config;
    let width = c.ple.unwrap_or(1);
    let context = p.scale(
        p.linear(embedded, slices.projection),
        1.0 / (c.dim as f32).sqrt(),
    );
    let context = p.group_norm(context, Some(w.norm), width, c.eps);
    let token = p.embed_like(slices.table, (width as f32).sqrt(), embedded);
    p.scale(p.add(context, token), std::f32::consts::FRAC_1_SQRT_2)
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
    let gated = p.gelu_mul(p.linear(x, w.gate), ple, column);
    p.norm(p.linear(gated, w.projection), w.post_norm, m.config.eps)
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
    }
}

/// One table a kind of layer. Frequencies are computed in f64, so that far positions turn by the right angle.
fn rope_tables(p: &Builder<'_>, m: &Model) -> impl Fn(LayerKind) -> RopeId + use<> {
    let c = &m.config;
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
        }))
    };
    let full = table(LayerKind::Full, c.rope_base.full, &m.rope_divisors);
    let sliding = table(LayerKind::Sliding, c.rope_base.sliding, &[]);
    move |kind| {
        match kind {
            LayerKind::Full => full,
            LayerKind::Sliding => sliding,
        }
        .expect("a table exists for every kind of layer there is")
    }
}
