use std::fmt;

/// The element type of an [`Array`](crate::Array).
///
/// The order is that of `mlx::core::Dtype::Val`; the discriminant crosses the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Dtype {
    Bool,
    U8,
    U16,
    U32,
    U64,
    I8,
    I16,
    I32,
    I64,
    F16,
    F32,
    F64,
    Bf16,
    Complex64,
}

impl Dtype {
    const ALL: [Dtype; 14] = [
        Dtype::Bool,
        Dtype::U8,
        Dtype::U16,
        Dtype::U32,
        Dtype::U64,
        Dtype::I8,
        Dtype::I16,
        Dtype::I32,
        Dtype::I64,
        Dtype::F16,
        Dtype::F32,
        Dtype::F64,
        Dtype::Bf16,
        Dtype::Complex64,
    ];

    pub(crate) fn from_code(code: u8) -> Self {
        Self::ALL[usize::from(code)]
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Complex64 => 8,
        }
    }

    /// Whether this is a real floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::F32 | Self::F64 | Self::Bf16)
    }

    /// The most negative finite value, as `finfo(dtype).min` gives it; that of `f32` for types that are
    /// not floating point.
    pub const fn finite_min(self) -> f64 {
        match self {
            Self::F16 => -65504.0,
            Self::Bf16 => -3.3895313892515355e38,
            Self::F64 => f64::MIN,
            _ => f32::MIN as f64,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "bool",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Bf16 => "bfloat16",
            Self::Complex64 => "complex64",
        })
    }
}

/// A Rust type that has the memory layout of a [`Dtype`].
pub trait Element: bytemuck::Pod {
    /// The matching dtype.
    const DTYPE: Dtype;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {
        $(impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}
element!(
    u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    half::f16 => F16, f32 => F32, f64 => F64, half::bf16 => Bf16
);
