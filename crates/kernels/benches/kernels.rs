//! Speed of the kernels against what the machine can do: `cargo bench -p russet-kernels [-- FILTER [ISA]]`, with
//! an instruction set by its name in [`Isa`].
//!
//! Products with one row are given in GB/s of weight bytes and as a share of the measured read bandwidth, those
//! with many in GFLOP/s and as a share of the measured f32 multiply–add peak, at 1 and 2 threads. Weights are
//! cycled through so that one row's come from memory.

#![allow(unsafe_code, clippy::print_stdout, reason = "a benchmark measures with intrinsics and prints")]

use std::hint::black_box;
use std::time::Instant;

use russet_kernels::cpu::*;

/// Bytes of weights that are cycled through: more than caches hold.
const WORKING_SET: usize = 1 << 30;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let filter = words.first().cloned().unwrap_or_default();
    let isa = words.get(1).and_then(|name| Isa::available().iter().find(|isa| format!("{isa:?}") == *name));
    let isa = isa.copied().unwrap_or(Isa::best());
    let cpus = [1, 2].map(|threads| Cpu::with_isa(threads, isa));
    println!("instruction set {:?}", cpus[0].isa());
    let memory = vec![1u8; WORKING_SET];
    let machine = Machine { memory: &memory };
    for cpu in &cpus {
        println!(
            "{} threads: read {:.1} GB/s, multiply-add {:.0} GFLOP/s",
            cpu.pool().threads(),
            machine.bandwidth(cpu),
            machine.peak(cpu)
        );
    }
    let four = |group| QuantFormat::Affine { bits: 4, group, scales: FloatType::F16 };
    let eight = QuantFormat::Affine { bits: 8, group: 32, scales: FloatType::F16 };
    if "qmv".contains(&filter) {
        for (format, n, k) in [
            (four(32), 576, 576),
            (four(32), 960, 576),
            (four(32), 3072, 576),
            (four(32), 576, 1536),
            (eight, 49152, 576),
            (four(64), 4096, 4096),
            (four(32), 4096, 14336),
            (QuantFormat::Affine { bits: 6, group: 64, scales: FloatType::Bf16 }, 4096, 4096),
            (QuantFormat::Mxfp4, 4096, 4096),
            (QuantFormat::Nvfp4, 4096, 4096),
            (QuantFormat::Mxfp8, 4096, 4096),
        ] {
            qmv(&machine, &cpus, format, n, k);
        }
    }
    if "qmm".contains(&filter) {
        for (format, n, k) in
            [(four(32), 576, 576), (four(32), 3072, 576), (four(32), 576, 1536), (four(64), 4096, 4096)]
        {
            for m in [4, 16, 512] {
                qmm(&machine, &cpus, format, n, k, m);
            }
        }
    }
    if "dense".contains(&filter) {
        dense(&machine, &cpus);
    }
    if "attention".contains(&filter) {
        attend(&machine, &cpus);
    }
    if "delta".contains(&filter) {
        delta(&cpus);
    }
    if "dispatch".contains(&filter) {
        for cpu in &cpus {
            let seconds = median(20, || (0..1000).for_each(|_| cpu.pool().run(6, &|_| ()).unwrap()));
            println!("dispatch of 6 empty chunks, {} threads: {:.2} us", cpu.pool().threads(), seconds * 1e3);
        }
    }
}

/// What the machine can do, measured beside each kernel since other processes share it.
struct Machine<'a> {
    memory: &'a [u8],
}

impl Machine<'_> {
    fn bandwidth(&self, cpu: &Cpu) -> f64 {
        let chunk = 16 << 20;
        let mut chunks = self.memory.chunks_exact(chunk).cycle();
        let seconds = median(24, || {
            let memory = chunks.next().unwrap_or_default();
            cpu.pool()
                .ranges(memory.len() / 64, 64, |lines| {
                    black_box(read(&memory[lines.start * 64..lines.end * 64]));
                })
                .unwrap();
        });
        chunk as f64 / seconds / 1e9
    }

    fn peak(&self, cpu: &Cpu) -> f64 {
        let rounds = 20_000;
        let threads = cpu.pool().threads();
        let mut flops = 0.0;
        let seconds = median(15, || {
            let done = std::sync::atomic::AtomicU64::new(0);
            cpu.pool()
                .run(threads, &|_| {
                    done.fetch_add(multiply_add(rounds), std::sync::atomic::Ordering::Relaxed);
                })
                .unwrap();
            flops = done.into_inner() as f64;
        });
        flops / seconds / 1e9
    }
}

#[cfg(target_arch = "x86_64")]
fn read(memory: &[u8]) -> u64 {
    use std::arch::x86_64::*;
    #[target_feature(enable = "avx2")]
    fn sum(memory: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for line in memory.chunks_exact(256) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 32 bytes at 32 * i lie in the 256.
                *sum =
                    unsafe { _mm256_add_epi64(*sum, _mm256_loadu_si256(line.as_ptr().add(32 * i).cast())) };
            }
        }
        let total = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi64(a, b));
        _mm256_extract_epi64::<0>(total) as u64
    }
    // SAFETY: benchmarks run on machines with AVX2.
    unsafe { sum(memory) }
}

#[cfg(not(target_arch = "x86_64"))]
fn read(memory: &[u8]) -> u64 {
    memory
        .chunks_exact(8)
        .fold(0, |a, b| a.wrapping_add(u64::from_ne_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])))
}

/// Runs multiply–adds and returns how many operations they were.
fn multiply_add(rounds: u64) -> u64 {
    const CHAINS: usize = 12;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn wide(rounds: u64) {
            let (b, c) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
            let mut a = [_mm512_set1_ps(black_box(1.0)); CHAINS];
            for _ in 0..rounds {
                for a in &mut a {
                    *a = _mm512_fmadd_ps(*a, b, c);
                }
            }
            black_box(a);
        }
        #[target_feature(enable = "avx2,fma")]
        fn narrow(rounds: u64) {
            let (b, c) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
            let mut a = [_mm256_set1_ps(black_box(1.0)); CHAINS];
            for _ in 0..rounds {
                for a in &mut a {
                    *a = _mm256_fmadd_ps(*a, b, c);
                }
            }
            black_box(a);
        }
        // SAFETY: the instruction set is the machine's.
        unsafe {
            if Isa::best() == Isa::Avx512 {
                wide(rounds);
                return rounds * CHAINS as u64 * 32;
            }
            narrow(rounds);
        }
        rounds * CHAINS as u64 * 16
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let mut a = [[black_box(1.0f32); 4]; CHAINS];
        for _ in 0..rounds {
            for a in a.as_flattened_mut() {
                *a = a.mul_add(0.999, 1e-3);
            }
        }
        black_box(a);
        rounds * CHAINS as u64 * 8
    }
}

/// Median seconds of a call, after one that does not count.
fn median(times: usize, mut f: impl FnMut()) -> f64 {
    f();
    let mut seconds: Vec<f64> = (0..times)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[times / 2]
}

fn noise(n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect()
}

fn activations(n: usize) -> Vec<f32> {
    noise(n).iter().map(|&b| f32::from(b) / 128.0 - 1.0).collect()
}

struct Stored {
    format: QuantFormat,
    shape: (usize, usize),
    parts: [Vec<u8>; 3],
}

impl Stored {
    fn new(format: QuantFormat, n: usize, k: usize) -> Self {
        let groups = n * k / format.group();
        let (scales, biases) = match format {
            QuantFormat::Affine { scales, .. } => {
                let value = |f32_bytes: [u8; 4], f16: u16, bf16: u16| match scales {
                    FloatType::F16 => f16.to_le_bytes().repeat(groups),
                    FloatType::Bf16 => bf16.to_le_bytes().repeat(groups),
                    FloatType::F32 => f32_bytes.repeat(groups),
                };
                let scale = value(0.0078125f32.to_le_bytes(), 0x2000, 0x3c00);
                (scale, value((-0.0625f32).to_le_bytes(), 0xac00, 0xbd80))
            }
            QuantFormat::Nvfp4 => (vec![56; groups], vec![]),
            _ => (vec![120; groups], vec![]),
        };
        Self { format, shape: (n, k), parts: [noise(n * k * format.bits() as usize / 8), scales, biases] }
    }

    fn view(&self) -> QuantizedMatrix<'_> {
        let [codes, scales, biases] = &self.parts;
        QuantizedMatrix::new(self.format, self.shape.0, self.shape.1, codes, scales, biases).unwrap()
    }
}

fn qmv(machine: &Machine<'_>, cpus: &[Cpu], format: QuantFormat, n: usize, k: usize) {
    let stored = Stored::new(format, n, k);
    let bytes = stored.view().bytes();
    let copies = (WORKING_SET / bytes).clamp(1, 300);
    let rows: Vec<Stored> = (0..copies).map(|_| Stored::new(format, n, k)).collect();
    let view = [stored.view()];
    let interleaved = Interleaved::pack(&cpus[0], &vec![&view[..]; copies]).unwrap();
    let x = activations(k);
    let mut y = vec![0.0; n];
    for cpu in cpus {
        let mut line = format!("{n:5}x{k:<5} {format:?} {}T:", cpu.pool().threads());
        let bandwidth = machine.bandwidth(cpu);
        for precision in [Precision::Int16, Precision::Int12, Precision::Int8, Precision::F32] {
            let mut input = PreparedInput::default();
            let per_call = (2 << 20) / bytes + 1;
            let mut next = 0;
            let mut time = |as_stored: bool| {
                median(25, || {
                    for _ in 0..per_call {
                        next = (next + 1) % copies;
                        let weights: Weights<'_> =
                            if as_stored { rows[next].view().into() } else { (&interleaved[next]).into() };
                        input.prepare(cpu, &x, 1, precision, weights).unwrap();
                        matmul(cpu, &mut [Product::new(weights, &input, &mut y).unwrap()]).unwrap();
                    }
                }) / per_call as f64
            };
            let a = bytes as f64 / time(false) / 1e9;
            let b = bytes as f64 / time(true) / 1e9;
            line += &format!(
                "  {precision:?} {a:.1} ({:.0} %), as stored {b:.1} ({:.0} %);",
                100.0 * a / bandwidth,
                100.0 * b / bandwidth
            );
        }
        println!("{line} of {bandwidth:.1} GB/s");
    }
}

fn qmm(machine: &Machine<'_>, cpus: &[Cpu], format: QuantFormat, n: usize, k: usize, m: usize) {
    let stored = Stored::new(format, n, k);
    let interleaved = Interleaved::new(&cpus[0], &[stored.view()]).unwrap();
    let x = activations(k * m);
    let mut y = vec![0.0; n * m];
    let flops = 2.0 * (n * k * m) as f64;
    for cpu in cpus {
        let peak = machine.peak(cpu);
        let mut line = format!("{n:5}x{k:<5} {format:?} M={m} {}T:", cpu.pool().threads());
        for precision in [Precision::Int16, Precision::Int12, Precision::Int8, Precision::F32] {
            let mut input = PreparedInput::default();
            let times = ((2e9 / flops) as usize).clamp(5, 20);
            let mut time = |weights: Weights<'_>| {
                median(times, || {
                    input.prepare(cpu, &x, m, precision, weights).unwrap();
                    matmul(cpu, &mut [Product::new(weights, &input, &mut y).unwrap()]).unwrap();
                })
            };
            let (a, b) = (time((&interleaved).into()), time(stored.view().into()));
            let prepare =
                median(times, || input.prepare(cpu, &x, m, precision, stored.view().into()).unwrap());
            line += &format!(
                "  {precision:?} {:.0} ({:.0} %), as stored {:.0}, prepare {:.0} %;",
                flops / a / 1e9,
                100.0 * flops / a / 1e9 / peak,
                flops / b / 1e9,
                100.0 * prepare / a
            );
        }
        println!("{line} of {peak:.0} GFLOP/s");
    }
}

fn dense(machine: &Machine<'_>, cpus: &[Cpu]) {
    for (float, n, k) in
        [(FloatType::Bf16, 1536, 576), (FloatType::Bf16, 4096, 4096), (FloatType::F32, 4096, 4096)]
    {
        let bytes = n * k * float.bytes();
        let copies = WORKING_SET / bytes;
        let data: Vec<Vec<u8>> = (0..copies).map(|_| vec![0x3c; bytes]).collect();
        for cpu in cpus {
            for m in [1, 4, 512] {
                let x = activations(k * m);
                let mut y = vec![0.0; n * m];
                let mut input = PreparedInput::default();
                let mut next = 0;
                let seconds = median(20, || {
                    next = (next + 1) % copies;
                    let weights = DenseMatrix::new(float, n, k, &data[next]).unwrap();
                    input.prepare(cpu, &x, m, Precision::F32, weights.into()).unwrap();
                    matmul(cpu, &mut [Product::new(weights, &input, &mut y).unwrap()]).unwrap();
                });
                let threads = cpu.pool().threads();
                let (speed, limit, unit) = if m > 8 {
                    (2.0 * (n * k * m) as f64 / seconds / 1e9, machine.peak(cpu), "GFLOP/s")
                } else {
                    (bytes as f64 / seconds / 1e9, machine.bandwidth(cpu), "GB/s")
                };
                println!(
                    "{n:5}x{k:<5} {float:?} M={m} {threads}T: {speed:.1} {unit} ({:.0} %)",
                    100.0 * speed / limit
                );
            }
        }
    }
}

fn attend(machine: &Machine<'_>, cpus: &[Cpu]) {
    for (heads, dim) in [((9, 3), 64), ((32, 8), 128)] {
        for (queries, keys) in [(1, 1024), (1, 4096), (512, 512), (512, 2048)] {
            for float in [FloatType::Bf16, FloatType::F32] {
                let kv = vec![0x3cu8; heads.1 * keys * dim * float.bytes()];
                let kv = KeyValues::Dense { float, data: &kv, head_stride: keys * dim, key_stride: dim };
                let q = activations(heads.0 * queries * dim);
                let mut out = vec![0.0; q.len()];
                for cpu in cpus {
                    let args = Attention {
                        queries: &q,
                        query_strides: (dim, heads.0 * dim),
                        keys: kv,
                        values: kv,
                        query_heads: heads.0,
                        key_heads: heads.1,
                        query_len: queries,
                        key_len: keys,
                        head_dim: dim,
                        value_dim: dim,
                        scale: 0.1,
                        softcap: None,
                        mask: Mask::Causal,
                    };
                    let seconds =
                        median(15, || attention(cpu, &args, &mut out, (dim, heads.0 * dim)).unwrap());
                    let pairs = queries * keys - queries * (queries - 1) / 2;
                    let flops = 4.0 * (heads.0 * dim * pairs) as f64 / seconds / 1e9;
                    let bytes = (2 * heads.1 * keys * dim * float.bytes()) as f64 / seconds / 1e9;
                    println!(
                        "attention {heads:?} heads of {dim}, {queries} queries, {keys} {float:?} keys {}T: {:.0} us, \
                         {flops:.0} GFLOP/s ({:.0} %), {bytes:.1} GB/s",
                        cpu.pool().threads(),
                        seconds * 1e6,
                        100.0 * flops / machine.peak(cpu)
                    );
                }
            }
        }
    }
}

fn delta(cpus: &[Cpu]) {
    for len in [1, 512] {
        let shape = DeltaShape { len, key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
        let (keys, values) = (len * 16 * 128, len * 32 * 128);
        let (q, v, gates) = (activations(keys), activations(values), vec![0.01; len * 32]);
        let (mut state, mut out) = (vec![0.0; 32 * 128 * 128], vec![0.0; values]);
        for cpu in cpus {
            let seconds = median(7, || {
                gated_delta(cpu, shape, &q, &q, &v, &gates, &gates, &mut state, &mut out).unwrap();
            });
            let threads = cpu.pool().threads();
            println!(
                "gated delta, 32 heads of 128 x 128, {len} tokens {threads}T: {:.1} us a token",
                seconds * 1e6 / len as f64
            );
        }
    }
}
