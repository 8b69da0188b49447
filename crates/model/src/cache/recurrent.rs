use std::rc::Rc;

use russet_mlx::{Array, concatenate, eval};

use super::take_rows;
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

impl RecurrentState {
    /// Applies `f` to both arrays.
    fn map(&self, f: impl Fn(&Array) -> russet_mlx::Result<Array>) -> Result<Self> {
        Ok(Self { tail: f(&self.tail)?, memory: f(&self.memory)? })
    }

    /// One under the other, as rows.
    fn stack(parts: &[Self]) -> Result<Self> {
        let tails: Vec<Array> = parts.iter().map(|part| part.tail.clone()).collect();
        let memories: Vec<Array> = parts.iter().map(|part| part.memory.clone()).collect();
        Ok(Self { tail: concatenate(&tails, 0)?, memory: concatenate(&memories, 0)? })
    }

    /// One row.
    fn row(&self, row: i32) -> Result<Self> {
        self.map(|a| a.slice_axis(0, row, row + 1))
    }
}

/// The state of a recurrent layer, of one sequence or of several (`mlx_lm.models.cache.ArraysCache`).
///
/// It can't be trimmed: what a token has done to it can't be taken back. A clone taken before, which costs
/// references, or a round of speculation (see [`Cache::begin_round`](super::Cache::begin_round)) go back instead.
#[derive(Clone, Debug)]
pub struct RecurrentCache {
    /// One row per sequence.
    state: Option<RecurrentState>,
    /// Tokens that each row has consumed.
    tokens: Vec<i32>,
    /// Columns behind each row's last token in a padded call.
    padding: Option<Vec<i32>>,
    round: Option<Round>,
}

impl Default for RecurrentCache {
    fn default() -> Self {
        Self::of(None, vec![0])
    }
}

/// What a round of speculation goes back to, and with.
#[derive(Clone, Debug)]
struct Round {
    before: Option<RecurrentState>,
    tokens: Vec<i32>,
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
        let (out, state) = match &self.padding {
            None => recurrence.advance(&inputs, self.state.as_ref())?,
            Some(padding) => self.advance_row_by_row(recurrence, &inputs, padding)?,
        };
        self.state = Some(state);
        self.tokens.iter_mut().for_each(|tokens| *tokens += length);
        if let Some(round) = &mut self.round {
            round.recorded = Some(Recorded { recurrence: recurrence.clone(), inputs });
        }
        Ok(out)
    }

    /// The same for rows with padding behind their tokens, which leaves no trace.
    fn advance_row_by_row(
        &self,
        recurrence: &Rc<dyn Recurrence>,
        inputs: &RecurrentInputs,
        padding: &[i32],
    ) -> Result<(Array, RecurrentState)> {
        let length = inputs.qkv.dim(1)?;
        let (mut outputs, mut states) = (Vec::new(), Vec::new());
        for (row, padding) in (0..).zip(padding) {
            let own = |x: &Array| x.slice_axis(0, row, row + 1)?.slice_axis(1, 0, length - padding);
            let RecurrentInputs { qkv, a, b } = inputs;
            let inputs = RecurrentInputs { qkv: own(qkv)?, a: own(a)?, b: own(b)? };
            let before = self.state.as_ref().map(|state| state.row(row)).transpose()?;
            let (out, state) = recurrence.advance(&inputs, before.as_ref())?;
            outputs.push(out.pad([0, 0, 0], [0, *padding, 0], 0)?);
            states.push(state);
        }
        Ok((concatenate(&outputs, 0)?, RecurrentState::stack(&states)?))
    }

    /// Tokens that each row has consumed.
    pub fn lengths(&self) -> &[i32] {
        &self.tokens
    }

    /// The state of one sequence of `tokens` tokens.
    pub(super) fn restored(tail: Array, memory: Array, tokens: i32) -> Self {
        Self::of(Some(RecurrentState { tail, memory }), vec![tokens])
    }

    fn of(state: Option<RecurrentState>, tokens: Vec<i32>) -> Self {
        Self { state, tokens, padding: None, round: None }
    }

    /// The rows of all of `caches`.
    pub(super) fn stacked(caches: &[Self]) -> Result<Self> {
        let tokens = caches.iter().flat_map(|cache| cache.tokens.iter().copied()).collect();
        let Some(like) = caches.iter().find_map(|cache| cache.state.as_ref()) else {
            return Ok(Self::of(None, tokens));
        };
        let states = caches.iter().map(|cache| match &cache.state {
            Some(state) => Ok(state.clone()),
            // What a sequence starts from.
            None => like.map(|a| {
                let mut shape = a.shape();
                shape[0] = cache.tokens.len() as i32;
                Array::zeros(shape, a.dtype())
            }),
        });
        let states = states.collect::<Result<Vec<_>>>()?;
        Ok(Self::of(Some(RecurrentState::stack(&states)?), tokens))
    }

    /// Some of the rows.
    pub(super) fn filtered(&self, rows: &[usize]) -> Result<Self> {
        let state = self.state.as_ref().map(|state| state.map(|a| take_rows(a, rows))).transpose()?;
        let tokens = rows.iter().filter_map(|&row| self.tokens.get(row).copied()).collect();
        Ok(Self::of(state, tokens))
    }

    /// One row alone, in memory of its own.
    pub(super) fn extract(&self, row: usize) -> Result<Self> {
        let row = self.filtered(&[row])?;
        eval(&row.arrays())?;
        Ok(row)
    }

    pub(super) fn begin_padded(&mut self, padding: &[i32]) {
        self.padding = Some(padding.to_vec());
    }

    pub(super) fn end_padded(&mut self) {
        for (tokens, padding) in self.tokens.iter_mut().zip(self.padding.take().unwrap_or_default()) {
            *tokens -= padding;
        }
    }

    /// The state, if any token was consumed: tail and memory.
    pub fn arrays(&self) -> Vec<Array> {
        self.state.iter().flat_map(|s| [s.tail.clone(), s.memory.clone()]).collect()
    }

    pub(super) fn begin_round(&mut self) {
        self.round = Some(Round { before: self.state.clone(), tokens: self.tokens.clone(), recorded: None });
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
        let Some(Round { before, tokens, recorded: Some(recorded) }) = self.round.take() else {
            return Err(Error::Input("the round has no forward pass to undo".into()));
        };
        (self.state, self.tokens) = (before, tokens);
        if keep > 0 {
            let first = |x: &Array| x.slice_axis(1, 0, keep);
            let RecurrentInputs { qkv, a, b } = &recorded.inputs;
            let kept = RecurrentInputs { qkv: first(qkv)?, a: first(a)?, b: first(b)? };
            self.advance(&recorded.recurrence, kept)?;
        }
        Ok(())
    }
}
