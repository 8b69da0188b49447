use std::collections::BTreeMap;
use std::fmt;

use crate::Result;
use crate::bridge::ffi;

/// Where operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor.
    Cpu,
    /// The GPU of the linked MLX build (Metal or CUDA).
    Gpu,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        })
    }
}

impl Device {
    fn from_gpu(gpu: bool) -> Self {
        if gpu { Self::Gpu } else { Self::Cpu }
    }

    fn is_gpu(self) -> bool {
        self == Self::Gpu
    }

    /// The device that operations use unless told otherwise: the GPU where there is one.
    pub fn default_device() -> Self {
        Self::from_gpu(ffi::default_device_is_gpu())
    }

    /// Makes this the default.
    pub fn set_default(self) -> Result<()> {
        Ok(ffi::set_default_device(self.is_gpu())?)
    }

    /// Whether the linked MLX build can use this device on this machine.
    pub fn is_available(self) -> bool {
        self == Self::Cpu || ffi::gpu_available()
    }
}

/// What is known of the default device.
#[derive(Clone, Debug, Default)]
pub struct DeviceInfo {
    /// Text properties, such as `device_name` and `architecture`.
    pub text: BTreeMap<String, String>,
    /// Numeric properties, such as `memory_size` in bytes.
    pub numbers: BTreeMap<String, usize>,
    /// Whether MLX was built for Metal and finds a device.
    pub metal: bool,
    /// Whether MLX was built for CUDA and finds a device.
    pub cuda: bool,
}

impl DeviceInfo {
    /// Asks MLX.
    pub fn query() -> Result<Self> {
        let mut info = Self { metal: ffi::metal_available(), cuda: ffi::cuda_available(), ..Self::default() };
        for property in ffi::device_info()? {
            if property.text.is_empty() {
                info.numbers.insert(property.name, property.number);
            } else {
                info.text.insert(property.name, property.text);
            }
        }
        Ok(info)
    }
}

/// A queue of operations on one device. It belongs to the thread that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    index: i32,
    device: Device,
    // Streams are thread-local in MLX.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Stream {
    fn at(index: i32, device: Device) -> Self {
        Self { index, device, not_send: std::marker::PhantomData }
    }

    /// A new stream.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self::at(ffi::new_stream(device.is_gpu())?, device))
    }

    /// The stream that operations of this thread use on `device`.
    pub fn default_stream(device: Device) -> Result<Self> {
        Ok(Self::at(ffi::default_stream(device.is_gpu())?, device))
    }

    /// Makes this the default stream of its device on this thread.
    pub fn set_default(self) -> Result<()> {
        Ok(ffi::set_default_stream(self.index, self.device.is_gpu())?)
    }

    /// Waits for everything enqueued on the default stream.
    pub fn synchronize() -> Result<()> {
        Ok(ffi::synchronize()?)
    }

    /// Destroys all streams of this thread; afterwards its arrays can't be evaluated.
    pub fn clear() -> Result<()> {
        Ok(ffi::clear_streams()?)
    }
}
