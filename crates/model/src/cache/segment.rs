//! Sequences put together from parts of others.

use std::ops::Range;

use super::{Cache, KernelKvCache, KeysValues, KvCache, LayerCache};
use crate::{Error, Result};

/// Keys and values of consecutive tokens of a sequence, in the layers that keep those of all tokens. It has memory of
/// its own.
#[derive(Clone, Debug)]
pub struct CacheSegment {
    tokens: i32,
    /// Per layer; none in those that keep something else.
    layers: Vec<Option<KeysValues>>,
}

/// What the other layers keep: rings and recurrent states, which hold after exactly one number of tokens. It has memory
/// of its own.
#[derive(Clone, Debug)]
pub struct CacheState {
    /// Per layer; none in those that a [`CacheSegment`] has.
    layers: Vec<Option<LayerCache>>,
}

impl CacheSegment {
    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Bytes of the keys and values.
    pub fn nbytes(&self) -> usize {
        let layers = self.layers.iter().flatten();
        layers.map(|layer| layer.keys.nbytes() + layer.values.nbytes()).sum()
    }

    /// The part of the given tokens, copied.
    ///
    /// # Errors
    /// When it has no such tokens, or memory is refused.
    pub fn part(&self, range: Range<usize>) -> Result<Self> {
        let (start, stop) = checked(&range, self.tokens)?;
        let part = |layer: &KeysValues| layer.slice(start, stop)?.copied();
        let layers = self.layers.iter().map(|layer| layer.as_ref().map(part).transpose());
        Ok(Self { tokens: stop - start, layers: layers.collect::<Result<_>>()? })
    }
}

impl CacheState {
    /// Bytes of the buffers.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().flatten().map(LayerCache::nbytes).sum()
    }
}

impl Cache {
    /// Whether every layer keeps keys and values of all tokens, so that segments are all that there is to a sequence.
    pub fn is_segments(&self) -> bool {
        self.layers.iter().all(|layer| matches!(layer, LayerCache::Full(_) | LayerCache::Kernel(_)))
    }

    /// Copies keys and values of the given tokens.
    ///
    /// # Errors
    /// For a batch, when it has no such tokens, and when memory is refused.
    pub fn segment(&self, range: Range<usize>) -> Result<CacheSegment> {
        let (start, stop) = checked(&range, self.offset())?;
        let layers = self.layers.iter().map(|layer| {
            Ok(match layer {
                LayerCache::Full(cache) => {
                    cache.used()?.map(|used| used.slice(start, stop)?.copied()).transpose()?
                }
                LayerCache::Kernel(cache) => {
                    let [keys, values] = cache.to_arrays()?;
                    Some(KeysValues { keys, values }.slice(start, stop)?.copied()?)
                }
                LayerCache::Rotating(_) | LayerCache::Recurrent(_) => None,
                LayerCache::BatchFull(_) | LayerCache::BatchRotating(_) | LayerCache::BatchKernel(_) => {
                    return Err(Error::Input("a batch has no segments: extract a row first".into()));
                }
            })
        });
        Ok(CacheSegment { tokens: stop - start, layers: layers.collect::<Result<_>>()? })
    }

    /// Copies what the layers keep that have no segments.
    ///
    /// # Errors
    /// For a batch, and when memory is refused.
    pub fn state(&self) -> Result<CacheState> {
        let layers = self.layers.iter().map(|layer| match layer {
            LayerCache::Full(_) | LayerCache::Kernel(_) => Ok(None),
            layer => layer.compacted().map(Some),
        });
        Ok(CacheState { layers: layers.collect::<Result<_>>()? })
    }

    /// Makes this empty cache that of a sequence: `segments` are its tokens from the first on, `state` is what the other
    /// layers keep after them.
    ///
    /// # Errors
    /// When the parts are of another model or lack a layer, and when memory is refused.
    pub fn assemble(&mut self, segments: &[&CacheSegment], state: Option<&CacheState>) -> Result<()> {
        let missing = || Error::Input("the parts of the sequence do not make up its layers".into());
        let tokens = segments.iter().map(|segment| segment.tokens).sum();
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let parts = || {
                let parts = segments.iter().map(|segment| segment.layers.get(i)?.as_ref());
                parts
                    .collect::<Option<Vec<&KeysValues>>>()
                    .filter(|parts| !parts.is_empty())
                    .ok_or_else(missing)
            };
            *layer = match layer {
                LayerCache::Full(_) => {
                    let buffer = Some(KeysValues::concatenate(&parts()?)?);
                    LayerCache::Full(KvCache { buffer, offset: tokens })
                }
                LayerCache::Kernel(_) => {
                    let KeysValues { keys, values } = KeysValues::concatenate(&parts()?)?;
                    LayerCache::Kernel(KernelKvCache::of_arrays(&keys, &values)?)
                }
                _ => {
                    let kept = state.and_then(|state| state.layers.get(i)?.clone()).ok_or_else(missing)?;
                    if kept.offset() != tokens {
                        return Err(missing());
                    }
                    kept
                }
            };
        }
        Ok(())
    }
}

fn checked(range: &Range<usize>, tokens: i32) -> Result<(i32, i32)> {
    if range.start < range.end && range.end <= tokens.max(0) as usize {
        return Ok((range.start as i32, range.end as i32));
    }
    Err(Error::Input(format!("a sequence of {tokens} tokens has no tokens {}..{}", range.start, range.end)))
}
