//! The forward pass of a drafter, as a plan.
//!
//! A row drafts from the last position that is cached: it sees all of the cache, or the newest `window - 1` positions of it, and
//! turns its queries as the position behind. Nothing is stored, so any number of steps in a row see the same: the position stays,
//! and only the token and the state go on.

use crate::{
    config::LayerKind,
    drafter::Drafter,
    gemma4::{dense_ffn, rope_tables},
    kv::KvGroup,
    phase::Section,
    plan::{Builder, KvSlot, Plan, Rows, SlotSpec},
};

/// The head of a draft step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// By clusters, in drafters that have them.
    Clusters,
    /// Every token gets a logit.
    Dense,
}

/// Describes one draft step: a token and a state in, logits and the next state ([`Plan::hidden`]) out.
pub fn plan(m: &Drafter, head: Head) -> Plan {
    let c = &m.config;
    let p = Builder::new(&m.weights);
    let ropes = rope_tables(&p, c, &m.rope_divisors, 1);
    p.section(Section::Embed(Rows::All));
    let token = p.embed(
        "token",
        m.embedding,
        (m.target_dim as f32).sqrt(),
        Rows::All,
    );
    let state = p.state("state", m.target_dim);
    let token = p.linear("pre_token", token, m.pre_token);
    let mut x = p.add("pre_add", token, p.linear("pre_state", state, m.pre_state));

    for (i, l) in m.layers.iter().enumerate() {
        let facts = &c.layers[i];
        p.section(Section::Attention(i));
        let h = p.norm("norm", x, l.attn_norm, c.eps);
        let q = p.linear("q", h, l.q);
        let q = p.group_norm("q_norm", q, Some(l.q_norm), facts.head_dim, c.eps);
        let q = p.rope("q_rope", q, ropes(facts.kind));
        let a = p.linear("o", p.attend(q, p.slot(borrowed_slot(m, i))), l.o);
        x = p.add("add", x, p.norm("post_norm", a, l.attn_post_norm, c.eps));

        p.section(Section::Ffn(i));
        let f = dense_ffn(&p, &l.ffn, x, c.eps);
        x = p.add("add", x, p.norm("post_norm", f, l.ffn_post_norm, c.eps));
        if l.out_scale != 1.0 {
            x = p.scale("out_scale", x, l.out_scale);
        }
    }

    p.section(Section::Head);
    let hidden = p.norm("norm", x, m.output_norm, c.eps);
    let next = p.linear("post", hidden, m.post);
    let logits = match m.clusters.as_ref().filter(|_| head == Head::Clusters) {
        Some(clusters) => {
            let table = p.cluster_table(clusters.tokens.clone());
            p.cluster_logits(hidden, [clusters.centroids, m.output], table, clusters.top)
        }
        None => p.linear("output", hidden, m.output),
    };
    p.finish(next, logits)
}

/// The keys and values that a layer reads. The target numbers its slots by layer.
fn borrowed_slot(m: &Drafter, i: usize) -> SlotSpec {
    let l = &m.config.layers[i];
    let (group, window) = match l.kind {
        LayerKind::Full => (KvGroup::Full, None),
        LayerKind::Sliding => (KvGroup::Sliding, Some(m.config.window - 1)),
    };
    SlotSpec {
        group,
        kv_heads: l.kv_heads,
        head_dim: l.head_dim,
        window,
        borrowed: Some(KvSlot(l.kv_source as u32)),
    }
}
