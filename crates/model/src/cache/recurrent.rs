use std::rc::Rc;

use russet_mlx::Array;

use crate::{Error, Result};

/// What a recurrent layer carries from one token to the next. Its size does not grow.
#[derive(Clone, Debug)]
pub struct RecurrentState {
    /// The last rows before the convolution, `[batch, taps - 1, channels]`.
    pub tail: Array,
    /// The delta rule's memory in `f32`, `[batch, value_heads, value_dim, key_dim]`.
    pub memory: Array,
}

/// A layer's inputs to its recurrence for one call, each `[batch, seq, width]`.
#[derive(Clone, Debug)]
pub struct RecurrentInputs {
    /// Queries, keys and values before the convolution.
    pub qkv: Array,
    /// What the decay is made from, per value head.
    pub a: Array,
    /// What the step size is made from, per value head.
    pub b: Array,
}

/// A layer's arithmetic from one state to the next.
pub trait Recurrence {
    /// Processes the tokens of `inputs` after those of `state`; `None` is the start of a sequence.
    /// Returns the layer's outputs and the state after the last token.
    ///
    /// Processing tokens in one call or in several leaves the same bits.
    fn advance(
        &self,
        inputs: &RecurrentInputs,
        state: Option<&RecurrentState>,
    ) -> Result<(Array, RecurrentState)>;
}

/// The state of a recurrent layer (`mlx_lm.models.cache.ArraysCache`).
///
/// It can't be trimmed: what a token has done to it can't be taken back. A clone taken before, which costs
/// references, or a round of speculation (see [`Cache::begin_round`](super::Cache::begin_round)) go back instead.
#[derive(Clone, Debug, Default)]
pub struct RecurrentCache {
    state: Option<RecurrentState>,
    offset: i32,
    round: Option<Round>,
}

/// What a round of speculation goes back to, and with.
#[derive(Clone, Debug)]
struct Round {
    before: Option<RecurrentState>,
    offset: i32,
    recorded: Option<Recorded>,
}

#[derive(Clone)]
struct Recorded {
    recurrence: Rc<dyn Recurrence>,
    inputs: RecurrentInputs,
}

impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Recorded({:?})", self.inputs)
    }
}

impl RecurrentCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `recurrence` over the tokens of `inputs` and keeps the state after them. In a round the inputs are
    /// recorded.
    ///
    /// # Errors
    /// When this is the second call of a round.
    pub fn advance(&mut self, recurrence: &Rc<dyn Recurrence>, inputs: RecurrentInputs) -> Result<Array> {
        if self.round.as_ref().is_some_and(|round| round.recorded.is_some()) {
            return Err(Error::Input(
                "a round of speculation has one forward pass; commit or roll back".into(),
            ));
        }
        let length = inputs.qkv.dim(1)?;
        let (out, state) = recurrence.advance(&inputs, self.state.as_ref())?;
        self.state = Some(state);
        self.offset += length;
        if let Some(round) = &mut self.round {
            round.recorded = Some(Recorded { recurrence: recurrence.clone(), inputs });
        }
        Ok(out)
    }

    /// Tokens consumed.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// The state, if any token was consumed: tail and memory.
    pub fn arrays(&self) -> Vec<Array> {
        self.state.iter().flat_map(|s| [s.tail.clone(), s.memory.clone()]).collect()
    }

    pub(super) fn begin_round(&mut self) {
        self.round = Some(Round { before: self.state.clone(), offset: self.offset, recorded: None });
    }

    pub(super) fn end_round(&mut self) {
        self.round = None;
    }

    /// Whether [`RecurrentCache::rollback`] can go back.
    pub(super) fn check_round(&self) -> Result<()> {
        let recorded = self.round.as_ref().and_then(|round| round.recorded.as_ref());
        let recorded =
            recorded.ok_or_else(|| Error::Input("the round has no forward pass to undo".into()))?;
        match recorded.inputs.qkv.dim(0)? {
            1 => Ok(()),
            rows => Err(Error::Input(format!("a cache of {rows} rows can't be rolled back as one sequence"))),
        }
    }

    /// Goes back to the state before the round and on by its first `keep` tokens.
    pub(super) fn rollback(&mut self, keep: i32) -> Result<()> {
        let Some(Round { before, offset, recorded: Some(recorded) }) = self.round.take() else {
            return Err(Error::Input("the round has no forward pass to undo".into()));
        };
        (self.state, self.offset) = (before, offset);
        if keep > 0 {
            let first = |x: &Array| x.slice_axis(1, 0, keep);
            let RecurrentInputs { qkv, a, b } = &recorded.inputs;
            let kept = RecurrentInputs { qkv: first(qkv)?, a: first(a)?, b: first(b)? };
            self.advance(&recorded.recurrence, kept)?;
        }
        Ok(())
    }
}
