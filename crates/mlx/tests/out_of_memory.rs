//! Allocations that fail. In a process of its own: MLX's memory counters count them as well.

use russet_mlx::{Array, CpuOp, Dtype, Input, Output, OutputSpec, Result, custom};

/// Writes a byte into each output.
struct Touch;
impl CpuOp for Touch {
    fn run(&self, _: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        outputs.iter_mut().try_for_each(|out| out.as_mut_slice::<u8>().map(|bytes| bytes[0] = 1))
    }
}

fn touched(shape: Vec<i32>) -> Array {
    custom(Touch, &[], vec![OutputSpec::new(shape, Dtype::U8)]).unwrap().remove(0)
}

#[test]
fn an_output_that_no_memory_can_hold_is_an_error() {
    for shape in [vec![i32::MAX, i32::MAX], vec![1 << 30, 1 << 18]] {
        let error = touched(shape).eval().unwrap_err().to_string();
        assert!(error.contains("allocate"), "{error}");
    }
    assert_eq!(touched(vec![1]).item::<u8>().unwrap(), 1);
}
