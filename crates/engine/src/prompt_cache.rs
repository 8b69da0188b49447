//! States that were computed before, for prompts that begin like earlier ones.

use std::cell::Cell;

use russet_mlx::memory;
use russet_model::cache::{CacheSegment, CacheState};
use russet_model::{Cache, Model};

use crate::Result;

/// A tree of the prompts that were read: each node is a block of tokens with their keys and values, and prompts that
/// begin alike share their first blocks.
///
/// A block is what one call reads. A state at the end of a block is therefore what any other prompt that begins like it
/// would compute, in every bit, and so is the rest of a prompt only for the same prompt: answers do not depend on what
/// was asked before. A cache that is told to gives up the last bits of that, and continues any tokens that it knows. The
/// cache belongs to one loaded model, and so to one artifact, fidelity and kind of cache: within
/// it tokens name a state.
#[derive(Debug)]
pub struct PromptCache {
    /// Tokens of a block.
    block: usize,
    /// Fewest tokens of a node that a prompt may go on after: those of a block, or any.
    least: usize,
    capacity: usize,
    roots: Vec<Node>,
    bytes: usize,
    /// Counts uses, for the order of eviction.
    clock: u64,
    statistics: PromptCacheStatistics,
}

/// What became of the prompts that were looked up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptCacheStatistics {
    /// Prompts of which some tokens were found.
    pub hits: u64,
    /// Prompts of which none were.
    pub misses: u64,
    /// Tokens found.
    pub tokens: u64,
    /// Blocks that were dropped to make room.
    pub evictions: u64,
}

/// A block, or the rest of a prompt after its last one.
#[derive(Debug)]
struct Node {
    tokens: Vec<u32>,
    segment: CacheSegment,
    /// What layers without segments keep after the last of the tokens, where it is known.
    state: Option<CacheState>,
    children: Vec<Node>,
    last_use: Cell<u64>,
}

impl Node {
    fn bytes(&self) -> usize {
        let state = self.state.as_ref().map_or(0, CacheState::nbytes);
        self.segment.nbytes() + state + size_of_val(self.tokens.as_slice()) + size_of::<Self>()
    }
}

impl PromptCache {
    /// An empty cache of at most `capacity` bytes, for prompts that are read in chunks of `block` tokens.
    pub fn new(capacity: usize, block: usize) -> Self {
        Self {
            block: block.max(1),
            least: block.max(1),
            capacity,
            roots: Vec::new(),
            bytes: 0,
            clock: 0,
            statistics: PromptCacheStatistics::default(),
        }
    }

    /// Lets prompts go on after any tokens that are known: states have other last bits than cold ones then.
    pub fn continuing_anywhere(self) -> Self {
        Self { least: 1, ..self }
    }

    /// Bytes of all keys, values, states and tokens.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What became of the prompts that were looked up.
    pub fn statistics(&self) -> PromptCacheStatistics {
        self.statistics
    }

    /// The state after as many of the first tokens of `prompt` as are known, at most all but the last one: at least one
    /// token is always evaluated. What is stored stays.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn find(&mut self, model: &Model, prompt: &[u32]) -> Result<Option<Cache>> {
        self.clock += 1;
        let mut cache = model.new_cache();
        let segments_only = cache.is_segments();
        let mut rest = prompt.split_last().map_or(prompt, |(_, rest)| rest);
        let mut path = Vec::new();
        let mut usable = 0;
        let mut nodes = &self.roots;
        while let Some(node) = position(nodes, rest, self.least).and_then(|index| nodes.get(index)) {
            rest = rest.get(node.tokens.len()..).unwrap_or_default();
            node.last_use.set(self.clock);
            path.push(node);
            if segments_only || node.state.is_some() {
                usable = path.len();
            }
            nodes = &node.children;
        }
        path.truncate(usable);
        let Some(last) = path.last() else {
            self.statistics.misses += 1;
            return Ok(None);
        };
        let segments: Vec<&CacheSegment> = path.iter().map(|node| &node.segment).collect();
        cache.assemble(&segments, last.state.as_ref())?;
        self.statistics.hits += 1;
        self.statistics.tokens += segments.iter().map(|segment| segment.tokens() as u64).sum::<u64>();
        Ok(Some(cache))
    }

    /// Keeps the state after `tokens`, which were read in blocks from the first on; what is new is copied. Makes room by
    /// dropping what was not used for the longest time. New blocks that do not fit are not kept.
    ///
    /// # Errors
    /// When `cache` is not the state of one sequence of that many tokens, or memory is refused.
    pub fn insert(&mut self, tokens: &[u32], cache: &Cache) -> Result<()> {
        self.clock += 1;
        let mut nodes = &mut self.roots;
        let (mut rest, mut depth) = (tokens, 0);
        // All that is new, from its first token on: a segment may cost a copy of the whole state.
        let mut added: Option<(usize, CacheSegment)> = None;
        while !rest.is_empty() {
            let index = match position(nodes, rest, self.least) {
                Some(index) => index,
                None => {
                    let block = rest.get(..self.block).unwrap_or(rest);
                    let (first, segment) = match &mut added {
                        Some(added) => added,
                        none => none.insert((depth, cache.segment(depth..tokens.len())?)),
                    };
                    let node = Node {
                        tokens: block.to_vec(),
                        segment: segment.part(depth - *first..depth + block.len() - *first)?,
                        state: None,
                        children: Vec::new(),
                        last_use: Cell::new(self.clock),
                    };
                    if node.bytes() > self.capacity {
                        break;
                    }
                    self.bytes += node.bytes();
                    nodes.push(node);
                    nodes.len() - 1
                }
            };
            let Some(node) = nodes.get_mut(index) else { break };
            node.last_use.set(self.clock);
            rest = rest.get(node.tokens.len()..).unwrap_or_default();
            depth += node.tokens.len();
            // Layers without segments are known at the end alone.
            if rest.is_empty() && node.state.is_none() && !cache.is_segments() {
                let before = node.bytes();
                node.state = Some(cache.state()?);
                self.bytes += node.bytes() - before;
            }
            nodes = &mut node.children;
        }
        self.shrink_to(self.capacity);
        Ok(())
    }

    /// [`PromptCache::insert`] for as many of `tokens` as `cache` has consumed. Not to be able to keep them is nobody's
    /// error.
    pub(crate) fn keep(&mut self, tokens: &[u32], cache: &Cache) {
        if let Some(consumed) = tokens.get(..cache.offset().max(0) as usize) {
            let _ = self.insert(consumed, cache);
        }
    }

    /// Drops what was not used for the longest time until at most `bytes` are left.
    pub fn shrink_to(&mut self, bytes: usize) {
        let before = self.bytes;
        while self.bytes > bytes {
            let Some(oldest) = oldest_leaf(&self.roots) else { break };
            self.bytes -= remove_leaf(&mut self.roots, oldest);
            self.statistics.evictions += 1;
        }
        if self.bytes < before {
            // Otherwise MLX would keep the memory. It is only slower if that fails.
            let _ = memory::clear_cache();
        }
    }
}

/// Which of these nodes a prompt goes through, of which `rest` is left: the longest of those that have `least` tokens or
/// all that are left.
fn position(nodes: &[Node], rest: &[u32], least: usize) -> Option<usize> {
    let fits =
        |node: &Node| node.tokens.len() >= least.min(rest.len()).max(1) && rest.starts_with(&node.tokens);
    let fitting = nodes.iter().enumerate().filter(|(_, node)| fits(node));
    fitting.max_by_key(|(_, node)| node.tokens.len()).map(|(index, _)| index)
}

/// When the leaf was used that was not used for the longest time.
fn oldest_leaf(nodes: &[Node]) -> Option<u64> {
    let of = |node: &Node| oldest_leaf(&node.children).or(Some(node.last_use.get()));
    nodes.iter().filter_map(of).min()
}

/// Drops one leaf that was last used at `time`; returns its bytes.
fn remove_leaf(nodes: &mut Vec<Node>, time: u64) -> usize {
    let is_leaf = |node: &Node| node.children.is_empty() && node.last_use.get() == time;
    if let Some(index) = nodes.iter().position(is_leaf) {
        return nodes.swap_remove(index).bytes();
    }
    let below = nodes.iter_mut().map(|node| remove_leaf(&mut node.children, time));
    below.into_iter().find(|&bytes| bytes > 0).unwrap_or(0)
}
