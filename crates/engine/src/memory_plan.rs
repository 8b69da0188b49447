//! What sequences will need, known before they begin.

use russet_mlx::{Device, DeviceInfo};
use russet_model::{KvSizes, Model};
use sysinfo::System;

/// The program and the libraries it links, with what they keep for themselves.
const PROGRAM: usize = 24 << 20;

/// Adds up memory, and says whether a sequence fits.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    kv: KvSizes,
    /// Bytes of the weights. Those that are interleaved take as much as those they replace.
    weights: usize,
    /// Bytes that a call needs beside weights and caches.
    call: usize,
    /// Bytes that may be used in all.
    budget: usize,
    /// Bytes set aside for sequences that run.
    reserved: usize,
}

impl MemoryPlan {
    /// A plan for calls of at most `chunk` tokens, within `budget` bytes; where absent, within what this process has and
    /// what is left.
    pub fn new(model: &Model, chunk: usize, budget: Option<usize>) -> Self {
        let footprint = model.footprint(0);
        // Pages of mapped files count as free.
        let own = if footprint.weights_mapped { footprint.weights_interleaved } else { footprint.weights };
        let budget = budget.unwrap_or_else(|| available_memory().saturating_add(own));
        let (weights, call) = (footprint.weights, transient(model, chunk));
        Self { kv: model.kv_sizes(), weights, call, budget, reserved: 0 }
    }

    /// Bytes that may be used in all.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Bytes of the weights.
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// Bytes of program and libraries, and of what a call needs beside weights and states.
    pub fn overhead(&self) -> usize {
        PROGRAM + self.call
    }

    /// Bytes that do not depend on sequences.
    pub fn fixed(&self) -> usize {
        self.weights + self.overhead()
    }

    /// Bytes of the state of a sequence of `tokens` tokens.
    pub fn sequence(&self, tokens: usize) -> usize {
        self.kv.bytes(tokens)
    }

    /// The longest sequence that fits when it is alone, at most `limit` tokens.
    pub fn longest(&self, limit: usize) -> usize {
        let room = self.budget.saturating_sub(self.fixed());
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
        let fits = kept <= self.room_beside(bytes) && self.reserved + bytes + self.fixed() <= self.budget;
        if fits {
            self.reserved += bytes;
        }
        fits
    }

    /// Bytes that are left for the prompt cache once `bytes` more are set aside.
    pub(crate) fn room_beside(&self, bytes: usize) -> usize {
        self.budget.saturating_sub(self.fixed()).saturating_sub(self.reserved).saturating_sub(bytes)
    }

    pub(crate) fn release(&mut self, bytes: usize) {
        self.reserved = self.reserved.saturating_sub(bytes);
    }
}

/// Bytes that a call of `chunk` tokens needs beside caches, in float32: queries, keys and values of all layers, as MLX
/// makes room for operations before those ahead of them have run; what one layer computes from the residual stream; and
/// logits.
fn transient(model: &Model, chunk: usize) -> usize {
    let shape = model.shape();
    let (hidden, vocabulary) = (shape.hidden.max(0) as usize, shape.vocabulary.max(0) as usize);
    let layers: usize = shape.kv.iter().map(|(per_token, _)| hidden + per_token).sum();
    4 * (chunk * (layers + 12 * hidden) + 4 * vocabulary)
}

/// Bytes that this process may still use: of the GPU's memory where MLX computes there, else what the machine has free,
/// within the limits of the process's control group.
fn available_memory() -> usize {
    if Device::default_device() == Device::Gpu
        && let Ok(info) = DeviceInfo::query()
        && let Some(&free) = ["free_memory", "max_recommended_working_set_size"]
            .iter()
            .find_map(|name| info.numbers.get(*name))
    {
        return free;
    }
    let mut system = System::new();
    system.refresh_memory();
    let free = system
        .cgroup_limits()
        .map_or(system.available_memory(), |limits| limits.free_memory.min(system.available_memory()));
    usize::try_from(free).unwrap_or(usize::MAX)
}
