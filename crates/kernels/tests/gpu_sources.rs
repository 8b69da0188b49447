//! The sources of the GPU kernels, compiled for the CPU and run there, and where there is a GPU the kernels
//! themselves, against the same computation with MLX's operations.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use russet_kernels::gpu::{CausalConvSilu, GatedDelta};
use russet_mlx::random::{self, KeySequence};
use russet_mlx::{Array, Backend, Device, DeviceInfo, Dtype, concatenate, stack};

/// Compiles `tests/host/NAME.cpp`, which includes the kernel's source.
fn compile(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut command = Command::new(&compiler);
    // MLX's library does not contract products and sums either.
    command.args(["-std=c++20", "-O2", "-pthread", "-ffp-contract=off", "-isystem"]).arg(env!("MLX_INCLUDE"));
    command.arg("-I").arg(root.join("tests/host")).arg("-I").arg(root.join("src/gpu"));
    command.arg(root.join("tests/host").join(name).with_extension("cpp")).arg("-o").arg(&program);
    let output = command.output().unwrap_or_else(|e| panic!("cannot run {compiler}: {e}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// What the program writes for a type, sizes and arrays.
fn run(program: &Path, dtype: Dtype, sizes: &[i32], arrays: &[&Array]) -> Vec<u8> {
    let mut input = vec![if dtype == Dtype::Bf16 { b'b' } else { b'f' }];
    sizes.iter().for_each(|size| input.extend(size.to_le_bytes()));
    arrays.iter().for_each(|array| input.extend(array.to_bytes().unwrap()));
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        output.stdout
    })
}

/// The backend of this machine's GPU.
fn gpu() -> Option<Backend> {
    let info = DeviceInfo::query().unwrap();
    match Device::default_device() {
        Device::Cpu => None,
        Device::Gpu => Some(if info.metal { Backend::Metal } else { Backend::Cuda }),
    }
}

fn normal(shape: &[i32], dtype: Dtype, keys: &mut KeySequence) -> Array {
    let x = random::normal(shape, Dtype::F32, &keys.next_key().unwrap()).unwrap();
    x.multiply(2.0).unwrap().astype(dtype).unwrap()
}

fn bytes(arrays: &[Array]) -> Vec<u8> {
    arrays.iter().flat_map(|a| a.to_bytes().unwrap()).collect()
}

#[track_caller]
fn assert_same_bits(actual: &[u8], expected: &[u8], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let unequal = actual.iter().zip(expected).filter(|(a, b)| a != b).count();
    assert_eq!(unequal, 0, "{what}: {unequal} bytes differ");
}

/// A linear-attention layer's operations one by one.
fn composed_convolution([x, tail, weight]: [&Array; 3]) -> [Array; 2] {
    let rows = concatenate(&[tail.clone(), x.clone()], 1).unwrap();
    let tail = rows.slice_axis(1, -3, i32::MAX).unwrap().contiguous().unwrap();
    let y = rows.conv1d(weight, 1, 0, 1, x.dim(2).unwrap()).unwrap();
    [y.multiply(&y.sigmoid().unwrap()).unwrap(), tail]
}

#[test]
fn the_convolution_equals_its_operations_bit_for_bit() {
    let program = compile("causal_conv_silu");
    let kernel = gpu().map(|backend| CausalConvSilu::new(backend).unwrap());
    let mut keys = KeySequence::new(1).unwrap();
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for rows in [1, 2, 3, 4, 7, 64] {
            for (batch, channels) in [(1, 8), (1, 96), (2, 1024)] {
                let what = format!("{dtype} {batch} × {rows} × {channels}");
                let x = normal(&[batch, rows, channels], dtype, &mut keys);
                let tail = normal(&[batch, 3, channels], dtype, &mut keys);
                let weight = normal(&[channels, 4, 1], dtype, &mut keys);
                let expected = bytes(&composed_convolution([&x, &tail, &weight]));
                match &kernel {
                    None => {
                        let actual = run(&program, dtype, &[batch, rows, channels], &[&x, &tail, &weight]);
                        assert_same_bits(&actual, &expected, &what);
                    }
                    Some(kernel) => {
                        let actual = kernel.call(&x, &tail, &weight).unwrap();
                        assert_same_bits(&bytes(&actual), &expected, &what);
                    }
                }
            }
        }
    }
}

/// The recurrence token by token.
fn composed_delta([q, k, v, decay, beta]: [&Array; 5], memory: &Array) -> [Array; 2] {
    let repeats = v.dim(2).unwrap() / q.dim(2).unwrap();
    let mut memory = memory.clone();
    let mut outputs = Vec::new();
    for t in 0..q.dim(1).unwrap() {
        let token =
            |x: &Array| x.slice_axis(1, t, t + 1).unwrap().squeeze([1]).unwrap().astype(Dtype::F32).unwrap();
        let row = |x: &Array| token(x).repeat(repeats, -2).unwrap().expand_dims([-2]).unwrap();
        let gate = |x: &Array| token(x).expand_dims([-1]).unwrap();
        memory = memory.multiply(&gate(decay).expand_dims([-1]).unwrap()).unwrap();
        let remembered = memory.multiply(&row(k)).unwrap().sum([-1], false).unwrap();
        let delta = token(v).subtract(&remembered).unwrap().multiply(&gate(beta)).unwrap();
        memory = memory.add(&row(k).multiply(&delta.expand_dims([-1]).unwrap()).unwrap()).unwrap();
        outputs.push(memory.multiply(&row(q)).unwrap().sum([-1], false).unwrap());
    }
    [stack(&outputs, 1).unwrap(), memory]
}

/// The largest difference of two arrays, over the largest value of the second.
fn relative_difference(actual: &Array, expected: &Array) -> f32 {
    let largest =
        |x: Array| x.abs().unwrap().flatten(0, -1).unwrap().max([0], false).unwrap().item::<f32>().unwrap();
    let actual = actual.astype(Dtype::F32).unwrap();
    largest(actual.subtract(expected).unwrap()) / largest(expected.clone())
}

#[test]
fn the_delta_rule_agrees_with_its_operations_and_sums_in_one_order() {
    let program = compile("gated_delta");
    let kernel = gpu().map(|backend| GatedDelta::new(backend).unwrap());
    let mut keys = KeySequence::new(2).unwrap();
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for (batch, tokens, key_dim) in [(1, 1, 128), (2, 3, 128), (1, 4, 64)] {
            let what = format!("{dtype} {batch} × {tokens} × {key_dim}");
            let scale = 0.5 / f64::from(key_dim).sqrt();
            let small = |x: Array| x.multiply(scale).unwrap();
            let q = small(normal(&[batch, tokens, 2, key_dim], dtype, &mut keys));
            let k = small(normal(&[batch, tokens, 2, key_dim], dtype, &mut keys));
            let v = normal(&[batch, tokens, 4, 8], dtype, &mut keys);
            let decay = normal(&[batch, tokens, 4], Dtype::F32, &mut keys).sigmoid().unwrap();
            let beta = normal(&[batch, tokens, 4], dtype, &mut keys).sigmoid().unwrap();
            let memory = normal(&[batch, 4, 8, key_dim], Dtype::F32, &mut keys);
            let inputs = [&q, &k, &v, &decay, &beta];
            let [y, after] = composed_delta(inputs, &memory);
            let [y_actual, after_actual] = match &kernel {
                Some(kernel) => kernel.call(inputs, &memory).unwrap(),
                None => {
                    let run = |lanes| {
                        let arrays = [&q, &k, &v, &decay, &beta, &memory];
                        run(&program, dtype, &[key_dim, lanes, batch, tokens], &arrays)
                    };
                    let (packed, spread) = (run(4), run(32));
                    assert_same_bits(&packed, &spread, &what);
                    let (y_bytes, memory_bytes) = packed.split_at(v.nbytes());
                    [read(y_bytes, &v), read(memory_bytes, &memory)]
                }
            };
            let tolerance = if dtype == Dtype::Bf16 { 4e-3 } else { 1e-5 };
            let (y_error, error) =
                (relative_difference(&y_actual, &y), relative_difference(&after_actual, &after));
            assert!(y_error < tolerance && error < 1e-5, "{what}: {y_error} and {error}");
        }
    }
}

/// An array of the type and shape of `like` from its bytes.
fn read(bytes: &[u8], like: &Array) -> Array {
    let flat = Array::from_slice(bytes, [bytes.len() as i32]).unwrap();
    flat.view(like.dtype()).unwrap().reshape(like.shape()).unwrap()
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    // Making a Metal kernel needs no Metal.
    let convolution = CausalConvSilu::new(Backend::Metal).unwrap();
    let zeros = |shape: &[i32], dtype| Array::zeros(shape, dtype).unwrap();
    let bf16 = |shape: &[i32]| zeros(shape, Dtype::Bf16);
    let f32 = |shape: &[i32]| zeros(shape, Dtype::F32);
    let (x, tail, weight) = (bf16(&[1, 5, 16]), bf16(&[1, 3, 16]), bf16(&[16, 4, 1]));
    for (x, tail, weight) in [
        (&bf16(&[5, 16]), &tail, &weight),
        (&bf16(&[1, 0, 16]), &tail, &weight),
        (&bf16(&[2, 5, 16]), &tail, &weight),
        (&x, &bf16(&[1, 4, 16]), &weight),
        (&x, &tail, &bf16(&[16, 1, 4])),
        (&x, &tail, &bf16(&[17, 4, 1])),
        (&x, &tail, &f32(&[16, 4, 1])),
        (&zeros(&[1, 5, 16], Dtype::F16), &zeros(&[1, 3, 16], Dtype::F16), &zeros(&[16, 4, 1], Dtype::F16)),
        (&bf16(&[1, 5, 4]), &bf16(&[1, 3, 4]), &bf16(&[4, 4, 1])),
        (&bf16(&[1, 1 << 16, 8]), &bf16(&[1, 3, 8]), &bf16(&[8, 4, 1])),
    ] {
        let message = convolution.call(x, tail, weight).err().unwrap().to_string();
        for array in [x, tail, weight] {
            assert!(message.contains(&format!("{array:?}")), "{message}");
        }
    }

    let delta = GatedDelta::new(Backend::Metal).unwrap();
    let (q, v, decay, beta) = (bf16(&[1, 2, 2, 64]), bf16(&[1, 2, 4, 8]), f32(&[1, 2, 4]), bf16(&[1, 2, 4]));
    let memory = f32(&[1, 4, 8, 64]);
    for (q, v, decay, memory) in [
        (&bf16(&[1, 2, 2, 48]), &v, &decay, &f32(&[1, 4, 8, 48])),
        (&bf16(&[1, 2, 3, 64]), &v, &decay, &memory),
        (&f32(&[1, 2, 2, 64]), &v, &decay, &memory),
        (&q, &bf16(&[1, 3, 4, 8]), &decay, &memory),
        (&q, &v, &bf16(&[1, 2, 4]), &memory),
        (&q, &v, &decay, &bf16(&[1, 4, 8, 64])),
        (&q, &v, &decay, &f32(&[1, 4, 64, 8])),
        (&bf16(&[0, 2, 2, 64]), &bf16(&[0, 2, 4, 8]), &f32(&[0, 2, 4]), &f32(&[0, 4, 8, 64])),
    ] {
        let message = delta.call([q, q, v, decay, &beta], memory).err().unwrap().to_string();
        for array in [q, v, decay, memory] {
            assert!(message.contains(&format!("{array:?}")), "{message}");
        }
    }
}
