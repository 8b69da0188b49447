//! Soundness of the binding: what must hold whatever the caller does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use russet_mlx::{
    Array, CpuOp, Dtype, Error, Input, Output, OutputSpec, Result, async_eval, compile, custom,
};

fn f32s(values: &[f32]) -> Array {
    Array::from_slice(values, [values.len() as i32]).unwrap()
}

#[test]
fn shape_errors_are_values_with_mlx_message() {
    let a = Array::zeros([2, 3], Dtype::F32).unwrap();
    let error = a.matmul(&a).unwrap_err().to_string();
    assert!(error.contains("matmul"), "{error}");
    assert!(a.reshape([4, 2]).is_err());
    assert!(a.slice_axis(2, 0, 1).is_err());
    assert!(a.dim(5).is_err());
    assert!(Array::from_slice(&[1.0f32, 2.0], [3]).is_err());
    assert!(Array::from_slice(&[1.0f32, 2.0], [-2]).is_err());
    // The library stays usable.
    assert_eq!(a.sum([0, 1], false).unwrap().item::<f32>().unwrap(), 0.0);
}

#[test]
fn element_type_is_checked() {
    let a = f32s(&[1.0]);
    assert!(a.as_slice::<u32>().is_err());
    assert!(a.to_vec::<half::bf16>().is_err());
    assert_eq!(a.item::<i32>().unwrap(), 1);
    assert!(f32s(&[1.0, 2.0]).item::<f32>().is_err());
}

#[test]
fn views_are_copied_out_in_row_major_order() {
    let a = Array::from_slice(&[1i32, 2, 3, 4, 5, 6], [2, 3]).unwrap();
    let t = a.transpose_all().unwrap();
    assert_eq!(t.to_vec::<i32>().unwrap(), [1, 4, 2, 5, 3, 6]);
    assert!(t.as_slice::<i32>().is_err(), "a transposed view is not row contiguous");
}

#[test]
fn weak_scalars_take_the_dtype_they_meet() {
    let bf16 = Array::ones([2], Dtype::Bf16).unwrap();
    let scaled = bf16.multiply(1536f64.sqrt()).unwrap();
    assert_eq!(scaled.dtype(), Dtype::Bf16);
    assert_eq!(scaled.astype(Dtype::F32).unwrap().to_vec::<f32>().unwrap(), [39.25, 39.25]);
    let ints = Array::from_slice(&[1i32, 2], [2]).unwrap();
    assert_eq!(ints.multiply(0.5).unwrap().dtype(), Dtype::F32);
    assert_eq!(ints.multiply(2).unwrap().dtype(), Dtype::I32);
    assert_eq!(ints.equal(1).unwrap().add(1).unwrap().dtype(), Dtype::I32);
    let bytes = Array::from_slice(&[1u8], [1]).unwrap();
    assert!(bytes.add(256).is_err(), "256 does not fit in uint8");
    assert_eq!(bf16.subtract_from(3.0).unwrap().dtype(), Dtype::Bf16);
}

/// Adds one to every element.
struct AddOne;
impl CpuOp for AddOne {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let out = outputs[0].as_mut_slice::<f32>()?;
        match inputs {
            [] => out.iter_mut().for_each(|x| *x += 1.0),
            [x, ..] => out.iter_mut().zip(x.as_slice::<f32>()?).for_each(|(o, x)| *o = x + 1.0),
        }
        Ok(())
    }
}

fn add_one(x: &Array) -> Array {
    custom(AddOne, std::slice::from_ref(x), vec![OutputSpec::new(x.shape(), x.dtype())]).unwrap().remove(0)
}

fn add_one_in_place(x: Array) -> Array {
    let spec = OutputSpec::in_place(x.shape(), x.dtype(), 0);
    custom(AddOne, &[x], vec![spec]).unwrap().remove(0)
}

#[test]
fn rust_operations_mix_with_mlx_operations() {
    let x = f32s(&[1.0, 2.0]).multiply(2.0).unwrap();
    let y = add_one(&add_one(&x)).multiply(10.0).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [40.0, 60.0]);
}

#[test]
fn in_place_operation_takes_over_a_buffer_that_nobody_holds() {
    let x = f32s(&[0.0; 1024]).add(1.0).unwrap();
    x.eval().unwrap();
    let before = x.as_slice::<f32>().unwrap().as_ptr();
    let y = add_one_in_place(x);
    assert_eq!(y.as_slice::<f32>().unwrap()[0], 2.0);
    assert_eq!(y.as_slice::<f32>().unwrap().as_ptr(), before);
}

#[test]
fn an_output_among_several_takes_over_its_input_too() {
    /// Adds one in place, and says so in a second output.
    struct AddOneAndTell;
    impl CpuOp for AddOneAndTell {
        fn run(&self, _: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
            outputs[1].as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += 1.0);
            outputs[0].as_mut_slice::<f32>()?[0] = 7.0;
            Ok(())
        }
    }
    let x = f32s(&[0.0; 1024]).add(1.0).unwrap();
    x.eval().unwrap();
    let before = x.as_slice::<f32>().unwrap().as_ptr();
    let specs = vec![OutputSpec::new(vec![1], Dtype::F32), OutputSpec::in_place(vec![1024], Dtype::F32, 0)];
    let outputs = custom(AddOneAndTell, &[x], specs).unwrap();
    assert_eq!(outputs[0].item::<f32>().unwrap(), 7.0);
    assert_eq!(outputs[1].as_slice::<f32>().unwrap()[0], 2.0);
    assert_eq!(outputs[1].as_slice::<f32>().unwrap().as_ptr(), before);
}

#[test]
fn in_place_operation_copies_a_buffer_that_is_held() {
    let x = f32s(&[1.0, 2.0]).add(0.0).unwrap();
    x.eval().unwrap();
    let held = x.clone();
    let y = add_one_in_place(x);
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 3.0]);
    assert_eq!(held.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    // A view of the buffer holds it as well.
    let x = f32s(&[1.0, 2.0]).add(0.0).unwrap();
    x.eval().unwrap();
    let view = x.slice([0], [1]).unwrap();
    view.eval().unwrap();
    assert_eq!(add_one_in_place(x).to_vec::<f32>().unwrap(), [2.0, 3.0]);
    assert_eq!(view.to_vec::<f32>().unwrap(), [1.0]);
}

#[test]
fn in_place_outputs_must_fit_their_input() {
    let x = f32s(&[1.0, 2.0]);
    for spec in [
        OutputSpec::in_place(vec![2], Dtype::F32, 1),
        OutputSpec::in_place(vec![3], Dtype::F32, 0),
        OutputSpec::in_place(vec![2], Dtype::I32, 0),
    ] {
        assert!(custom(AddOne, std::slice::from_ref(&x), vec![spec]).is_err());
    }
    let twice = vec![OutputSpec::in_place(vec![2], Dtype::F32, 0); 2];
    assert!(custom(AddOne, &[x], twice).is_err());
}

/// Fails, by error or by panic.
struct Fails(bool);
impl CpuOp for Fails {
    fn run(&self, _: &[Input<'_>], _: &mut [Output<'_>]) -> Result<()> {
        assert!(!self.0, "a panic on MLX's thread");
        Err(Error::new("no luck"))
    }
}

#[test]
fn errors_and_panics_of_an_operation_surface_at_eval_and_leave_the_stream_usable() {
    for (panics, message) in [(false, "no luck"), (true, "panic")] {
        let x = f32s(&[1.0]);
        let y = custom(Fails(panics), std::slice::from_ref(&x), vec![OutputSpec::new(vec![1], Dtype::F32)])
            .unwrap()
            .remove(0);
        let y = y.add(1.0).unwrap();
        let error = y.eval().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        assert_eq!(x.add(1.0).unwrap().item::<f32>().unwrap(), 2.0);
    }
}

/// Slow, and counts when it is dropped.
struct Slow(Arc<AtomicUsize>);
impl CpuOp for Slow {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        std::thread::sleep(Duration::from_millis(20));
        let x = inputs[0].as_slice::<f32>()?;
        outputs[0].as_mut_slice::<f32>()?.copy_from_slice(x);
        Ok(())
    }
}
impl Drop for Slow {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn outputs_may_be_dropped_while_their_computation_is_pending() {
    let drops = Arc::new(AtomicUsize::new(0));
    for _ in 0..5 {
        let x = Array::full([1 << 16], 1.0, Dtype::F32).unwrap();
        let spec = vec![OutputSpec::new(vec![1 << 16], Dtype::F32)];
        let y = custom(Slow(drops.clone()), &[x], spec).unwrap();
        async_eval(&y).unwrap();
    }
    russet_mlx::Stream::synchronize().unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), 5, "every operation is dropped once");
}

#[test]
fn strided_inputs_are_refused_as_slices_and_readable_as_strides() {
    struct Strided;
    impl CpuOp for Strided {
        fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
            assert!(inputs[0].as_slice::<f32>().is_err());
            let (data, strides) = inputs[0].as_strided::<f32>()?;
            let (rows, columns) = (inputs[0].shape()[0] as usize, inputs[0].shape()[1] as usize);
            let out = outputs[0].as_mut_slice::<f32>()?;
            for row in 0..rows {
                for column in 0..columns {
                    out[row * columns + column] =
                        data[row * strides[0] as usize + column * strides[1] as usize];
                }
            }
            Ok(())
        }
    }
    let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]).unwrap();
    let t = x.transpose_all().unwrap();
    let y = custom(Strided, &[t], vec![OutputSpec::new(vec![3, 2], Dtype::F32)]).unwrap().remove(0);
    assert_eq!(y.to_vec::<f32>().unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn compiled_functions_return_errors_of_their_body() {
    let double = compile(|x| Ok(vec![x[0].multiply(2.0)?]), true).unwrap();
    // Not evaluated: on the CPU that would need a C++ compiler.
    assert_eq!(double.call(&[f32s(&[1.0, 2.0])]).unwrap()[0].shape(), [2]);
    let fails = compile(|_| Err(Error::new("body failed")), true).unwrap();
    assert!(fails.call(&[f32s(&[1.0])]).unwrap_err().to_string().contains("body failed"));
    let panics = compile(|x| Ok(vec![x[7].clone()]), true).unwrap();
    assert!(panics.call(&[f32s(&[1.0])]).unwrap_err().to_string().contains("panic"));
}

#[test]
fn arrays_of_another_thread_are_evaluated_there() {
    let sum = std::thread::spawn(|| f32s(&[1.0, 2.0]).sum([0], false).unwrap().item::<f32>().unwrap());
    assert_eq!(sum.join().unwrap(), 3.0);
}
