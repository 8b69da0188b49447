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

impl Tier {
    /// Every tier.
    pub const ALL: &[Self] = &[Self::L1, Self::L2, Self::L3];

    /// The id that users read and write.
    pub fn id(self) -> &'static str {
        match self {
            Self::L1 => "l1",
            Self::L2 => "l2",
            Self::L3 => "l3",
        }
    }

    /// The program whose logits are the reference.
    pub fn oracle(self) -> Option<&'static str> {
        match self {
            Self::L1 => Some("mlx-lm"),
            Self::L2 => Some("mlx-optiq"),
            Self::L3 => None,
        }
    }

    /// The promise in words.
    pub fn meaning(self) -> String {
        match self.oracle() {
            Some(oracle) => format!("{} with {oracle}", self.claim()),
            None => format!("{} error", self.claim()),
        }
    }

    /// What is claimed about the logits.
    pub fn claim(self) -> &'static str {
        match self {
            Self::L1 | Self::L2 => "bit-exact",
            Self::L3 => "measured",
        }
    }
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
