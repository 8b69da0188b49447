//! What sequences will need, known before they begin.

use russet_model::{KvSizes, Model};
use sysinfo::System;

/// Adds up memory, and says whether a sequence fits.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    kv: KvSizes,
    /// Bytes that do not depend on sequences: weights, and what one call needs beside the caches.
    fixed: usize,
    /// Bytes that may be used in all.
    budget: usize,
    /// Bytes set aside for sequences that run.
    reserved: usize,
}

impl MemoryPlan {
    /// A plan for calls of at most `chunk` tokens, within `budget` bytes.
    pub fn new(model: &Model, chunk: usize, budget: usize) -> Self {
        let footprint = model.footprint(0);
        let weights = footprint.weights + footprint.weights_interleaved;
        Self { kv: model.kv_sizes(), fixed: weights + transient(model, chunk), budget, reserved: 0 }
    }

    /// Bytes that may be used in all.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Bytes that do not depend on sequences.
    pub fn fixed(&self) -> usize {
        self.fixed
    }

    /// Bytes of the state of a sequence of `tokens` tokens.
    pub fn sequence(&self, tokens: usize) -> usize {
        self.kv.bytes(tokens)
    }

    /// The longest sequence that fits when it is alone, at most `limit` tokens.
    pub fn longest(&self, limit: usize) -> usize {
        let room = self.budget.saturating_sub(self.fixed);
        // Bytes grow with tokens.
        let (mut fits, mut excess) = (0, limit.saturating_add(1));
        while excess - fits > 1 {
            let middle = fits + (excess - fits) / 2;
            if self.sequence(middle) <= room { fits = middle } else { excess = middle }
        }
        fits
    }

    /// Sets memory aside, if there is as much beside `kept` bytes of the prompt cache.
    pub(crate) fn reserve(&mut self, bytes: usize, kept: usize) -> bool {
        let fits = kept <= self.room_beside(bytes) && self.reserved + bytes + self.fixed <= self.budget;
        if fits {
            self.reserved += bytes;
        }
        fits
    }

    /// Bytes that are left for the prompt cache once `bytes` more are set aside.
    pub(crate) fn room_beside(&self, bytes: usize) -> usize {
        self.budget.saturating_sub(self.fixed).saturating_sub(self.reserved).saturating_sub(bytes)
    }

    pub(crate) fn release(&mut self, bytes: usize) {
        self.reserved = self.reserved.saturating_sub(bytes);
    }
}

/// Bytes that a call of `chunk` tokens needs beside caches: the residual stream, the widest of what a layer computes
/// from it, and logits, all in float32.
fn transient(model: &Model, chunk: usize) -> usize {
    let shape = model.shape();
    let (hidden, vocabulary) = (shape.hidden.max(0) as usize, shape.vocabulary.max(0) as usize);
    4 * (16 * hidden * chunk + 4 * vocabulary)
}

/// Bytes that this process may still use: what the machine has free, within the limits of the process's control group.
pub(crate) fn available_memory() -> usize {
    let mut system = System::new();
    system.refresh_memory();
    let free = system
        .cgroup_limits()
        .map_or(system.available_memory(), |limits| limits.free_memory.min(system.available_memory()));
    usize::try_from(free).unwrap_or(usize::MAX)
}
