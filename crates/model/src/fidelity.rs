use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// The fidelity that a user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fidelity {
    /// The best tier for the device.
    #[default]
    Auto,
    /// Exactly this tier.
    Tier(Tier),
}

/// What a model's logits are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Bit-exact with mlx-lm on the same MLX version and device.
    L1,
    /// Bit-exact with mlx-optiq on the same MLX version and device.
    L2,
    /// Measured error against the `f32` computation of the same stored weights.
    L3,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::L1 => "L1",
            Self::L2 => "L2",
            Self::L3 => "L3",
        })
    }
}

impl FromStr for Fidelity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "l1" => Self::Tier(Tier::L1),
            "l2" => Self::Tier(Tier::L2),
            "l3" => Self::Tier(Tier::L3),
            _ => {
                return Err(Error::Fidelity(format!("unknown fidelity '{text}': choose auto, l1, l2 or l3")));
            }
        })
    }
}
