//! Checks of config fields that several graphs read.

use crate::{Fields, Result};

/// Refuses an activation other than `supported`: the graph would compute that one whatever the config says.
pub(super) fn activation(config: &Fields<'_>, field: &str, supported: &[&str]) -> Result<()> {
    match config.text(field)? {
        Some(other) if !supported.contains(&other) => {
            let message =
                format!("'{}' is not supported (supported: {})", other.escape_debug(), supported.join(", "));
            Err(config.error(field, message))
        }
        _ => Ok(()),
    }
}

/// A width of heads: even, and small enough for `heads` of them.
pub(super) fn head_dim(config: &Fields<'_>, field: &str, head_dim: i32, heads: i32) -> Result<()> {
    if head_dim % 2 != 0 {
        return Err(config.error(field, format!("{head_dim} is not an even number")));
    }
    if heads.checked_mul(head_dim).is_none() {
        return Err(config.error(field, format!("{head_dim} for each of {heads} heads is too large")));
    }
    Ok(())
}

/// Key and value heads, of which each serves as many query heads.
pub(super) fn kv_heads(config: &Fields<'_>, field: &str, kv_heads: i32, heads: i32) -> Result<()> {
    match heads % kv_heads {
        0 => Ok(()),
        _ => Err(config.error(field, format!("{kv_heads} does not divide num_attention_heads {heads}"))),
    }
}

/// Experts that a router chooses of `count`.
pub(super) fn chosen_experts(config: &Fields<'_>, field: &str, chosen: i32, count: i32) -> Result<()> {
    match chosen <= count {
        true => Ok(()),
        false => Err(config.error(field, format!("{chosen} is more than num_experts {count}"))),
    }
}
