//! The head of a drafter by clusters: scores of the centroids, the nearest of them, and the logits of their tokens.

use carat_model::{
    backend::BackendError,
    plan::{Labelled, Rows, Step},
    weights::Weight,
};

use super::Lowering;
use crate::{
    config::Fusion,
    kernel::{
        ClusterLogits, Gemv, GemvEpilogue, GemvPrologue, GemvShape, MAX_CLUSTERS, NearestClusters,
        Operand, OutputRows, Overlap, WeightOperand, chosen_words,
    },
};

impl Lowering<'_> {
    pub(super) fn cluster_logits(&mut self, labelled: &Labelled) -> Result<(), BackendError> {
        let Step::ClusterLogits {
            x,
            centroids,
            w,
            clusters: table,
            top,
            out,
        } = labelled.step
        else {
            unreachable!("called for this step alone");
        };
        let (label, rows) = (labelled.label.as_str(), self.plan.rows(out));
        let clusters = self.weights.matrix(centroids).rows;
        if clusters > MAX_CLUSTERS {
            return Err(BackendError::Unsupported {
                what: format!("{label}: {clusters} clusters, at most {MAX_CLUSTERS} run on CUDA"),
            });
        }
        let scores = self.scratch_floats("cluster scores", clusters);
        let chosen = self.scratch(
            "nearest clusters",
            chosen_words(clusters) * size_of::<u32>(),
        );
        self.centroid_scores(
            &format!("{label} scores"),
            rows,
            (Operand::Value(x), centroids),
            scores,
        );
        let nearest = NearestClusters {
            scores,
            clusters,
            top,
            chosen,
        };
        self.call(&format!("{label} nearest"), rows, nearest);
        let head = self.weights.matrix(w);
        let logits = ClusterLogits {
            x: Operand::Value(x),
            w,
            quant: head.quant,
            columns: head.columns,
            vocab: head.rows,
            table,
            clusters,
            chosen,
            out: Operand::Value(out),
        };
        self.call(label, rows, logits);
        Ok(())
    }

    fn centroid_scores(
        &mut self,
        label: &str,
        rows: Rows,
        (x, centroids): (Operand, Weight),
        scores: Operand,
    ) {
        let matrix = self.weights.matrix(centroids);
        let (columns, outputs) = (matrix.columns, matrix.rows);
        let fast = match self.target.fusion {
            Fusion::On => self.gemv_format(centroids),
            Fusion::Off => None,
        };
        let Some((weights, format)) = fast else {
            let linear = self.linear(x, centroids, scores);
            return self.call(label, rows, linear);
        };
        let kernel = Gemv {
            prologue: GemvPrologue::None { x },
            w: WeightOperand::one(centroids, format),
            shape: GemvShape {
                weights,
                columns,
                outputs,
                pair: false,
                codes: false,
                top_k: None,
                ready: false,
                normed: false,
                card: self.card(),
            },
            epilogue: GemvEpilogue::Plain(vec![OutputRows {
                out: scores,
                first: 0,
                rows: outputs,
            }]),
            routed: None,
            pdl: self.pdl(),
            overlap: Overlap::default(),
        };
        self.call(label, rows, kernel);
    }
}
