//! A persistent pool of threads that share one operation at a time.
//!
//! An operation is cut into chunks; the calling thread and the workers claim chunks from one atomic counter
//! until none is left. The caller never waits for a worker that has not joined, so a worker that the system
//! took off its core costs at most the chunk it holds. Idle workers spin for 50 µs, then park.
//!
//! When waits show that workers lose their cores to other processes, the pool runs operations on the calling
//! thread alone for a while, then tries again.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::KernelError;

/// How long an idle worker spins before it parks: about the gap between two operations of one forward pass.
const SPIN: Duration = Duration::from_micros(50);

/// Chunks per thread that [`Pool::ranges`] aims at: enough that a late worker leaves little behind.
const CHUNKS_PER_THREAD: usize = 3;

/// A wait for a worker's last chunk longer than this, and than several chunks take, means it lost its core.
const STALL: Duration = Duration::from_micros(150);

/// First and longest time for which a pool whose workers stalled works alone.
const BACKOFF: Range<Duration> = Duration::from_millis(2)..Duration::from_millis(250);

type Task = *const (dyn Fn(usize) + Sync);

/// `state` holds the number of workers inside the operation in its low bits, whether it is open to more, and
/// above that the operation's number.
const OPEN: u64 = 1 << 16;
const WORKERS: u64 = OPEN - 1;
const EPOCH: u32 = 17;

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    chunks: AtomicUsize,
    task: UnsafeCell<Option<Task>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    quit: AtomicBool,
    parked: Vec<AtomicBool>,
}

// SAFETY: `task` is written by the one caller that holds `Pool::caller`, while no worker is inside an operation
// (`run` leaves only when the worker count is zero), and read by workers after they have joined an open one.
// The pointer it holds is to a `Sync` closure.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to a particular thread.
unsafe impl Send for Shared {}

/// What the caller learned about its workers.
struct Caller {
    /// Until when operations run on the calling thread alone.
    alone_until: Option<Instant>,
    backoff: Duration,
}

/// A persistent pool; see the [module](self).
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<Caller>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

thread_local! {
    /// Whether this thread is inside an operation: one that starts another runs it inline.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool of `threads` threads, the caller's included; workers that cannot be started are done without.
    pub fn new(threads: usize) -> Self {
        let count = threads.clamp(1, WORKERS as usize) - 1;
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            chunks: AtomicUsize::new(0),
            task: UnsafeCell::new(None),
            panic: Mutex::new(None),
            quit: AtomicBool::new(false),
            parked: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let workers = (0..count)
            .map_while(|id| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("kernel-{id}")).spawn(move || work(&shared, id)).ok()
            })
            .collect();
        let caller = Mutex::new(Caller { alone_until: None, backoff: BACKOFF.start });
        Self { shared, workers, caller }
    }

    /// Threads that share an operation, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)`, `task(1)`, … `task(chunks - 1)`, each once, spread over the threads, and returns when all
    /// have finished. Callers on several threads take turns, so cores are never oversubscribed; an operation
    /// started inside a chunk runs on that chunk's thread. Allocates nothing.
    ///
    /// # Errors
    /// [`KernelError::Panicked`] where a chunk panicked; the others have still run or been dropped.
    pub fn run(&self, chunks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), KernelError> {
        if self.workers.is_empty() || chunks <= 1 || INSIDE.get() {
            return run_alone(chunks, task);
        }
        let mut caller = self.lock_caller();
        let caller = &mut *caller;
        if let Some(until) = caller.alone_until {
            if Instant::now() < until {
                return run_alone(chunks, task);
            }
            caller.alone_until = None;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. Workers call the task between joining an open operation and
        // leaving it; this function closes the operation and waits for them before it returns.
        let task_ptr: Task = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Task>(task) };
        // SAFETY: no operation is open and no worker is inside one; the lock keeps other callers out.
        unsafe { *shared.task.get() = Some(task_ptr) };
        shared.chunks.store(chunks, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        let epoch = (shared.state.load(Ordering::Relaxed) >> EPOCH) + 1;
        shared.state.store(epoch << EPOCH | OPEN, Ordering::SeqCst);
        for (worker, parked) in self.workers.iter().zip(&shared.parked) {
            if parked.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let start = Instant::now();
        let done = claim(shared, task);
        let claimed = start.elapsed();
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & WORKERS != 0 {
            spins += 1;
            if spins < 2_000 {
                spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        if spins >= 2_000 {
            let waited = start.elapsed() - claimed;
            caller.note_wait(waited, claimed / done.max(1) as u32);
        } else if caller.backoff > BACKOFF.start {
            caller.backoff -= caller.backoff / 64;
        }
        match shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(payload) => Err(panicked(&*payload)),
            None => Ok(()),
        }
    }

    /// Cuts `units` into ranges of whole multiples of `quantum` (the last may be shorter) and runs `task` on
    /// each as [`run`](Self::run) does.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn ranges(
        &self,
        units: usize,
        quantum: usize,
        task: impl Fn(Range<usize>) + Sync,
    ) -> Result<(), KernelError> {
        let quantum = quantum.max(1);
        let quanta = units.div_ceil(quantum);
        let most = if self.workers.is_empty() { 1 } else { self.threads() * CHUNKS_PER_THREAD };
        let chunks = quanta.min(most);
        let bound = |i: usize| (quanta * i / chunks.max(1) * quantum).min(units);
        self.run(chunks, &|i| task(bound(i)..bound(i + 1)))
    }

    fn lock_caller(&self) -> MutexGuard<'_, Caller> {
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its tasks' panics, so joining it cannot fail in a way that matters here.
            let _ = worker.join();
        }
    }
}

impl Caller {
    /// Learns from a wait of `waited` for chunks that take about `chunk` each.
    fn note_wait(&mut self, waited: Duration, chunk: Duration) {
        if waited > STALL && waited > chunk * 4 {
            self.alone_until = Some(Instant::now() + self.backoff);
            self.backoff = (self.backoff * 2).min(BACKOFF.end);
        }
    }
}

fn run_alone(chunks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), KernelError> {
    catch_unwind(AssertUnwindSafe(|| (0..chunks).for_each(task))).map_err(|payload| panicked(&*payload))
}

/// Claims and runs chunks until none is left; returns how many it ran.
fn claim(shared: &Shared, task: &(dyn Fn(usize) + Sync)) -> usize {
    let chunks = shared.chunks.load(Ordering::Relaxed);
    let outer = INSIDE.replace(true);
    let mut done = 0;
    loop {
        let chunk = shared.next.fetch_add(1, Ordering::Relaxed);
        if chunk >= chunks {
            break;
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(chunk))) {
            *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            shared.next.store(chunks, Ordering::Relaxed);
        }
        done += 1;
    }
    INSIDE.set(outer);
    done
}

/// A worker's life.
fn work(shared: &Shared, id: usize) {
    let mut last = 0;
    let is_new = |state: u64, last: u64| state & OPEN != 0 && state >> EPOCH != last;
    loop {
        let mut idle_since = None;
        let state = loop {
            let state = shared.state.load(Ordering::Acquire);
            if is_new(state, last) {
                break state;
            }
            if shared.quit.load(Ordering::Relaxed) {
                return;
            }
            if idle_since.get_or_insert_with(Instant::now).elapsed() < SPIN {
                (0..32).for_each(|_| spin_loop());
                continue;
            }
            shared.parked[id].store(true, Ordering::SeqCst);
            if !is_new(shared.state.load(Ordering::SeqCst), last) && !shared.quit.load(Ordering::SeqCst) {
                std::thread::park();
            }
            shared.parked[id].store(false, Ordering::SeqCst);
            idle_since = None;
        };
        if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue;
        }
        last = state >> EPOCH;
        // SAFETY: this worker has joined an open operation: its caller wrote the task before opening it, and
        // neither changes it nor lets the closure go before the worker count is back at zero.
        let task = unsafe { (*shared.task.get()).map(|task| &*task) };
        if let Some(task) = task {
            claim(shared, task);
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

fn panicked(payload: &(dyn Any + Send)) -> KernelError {
    let text = payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    KernelError::Panicked(text)
}

/// Physical cores this process may use: hyperthreads are not counted, since two of them share the units that
/// kernels keep busy.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    physical_cores_of_machine().map_or(allowed, |cores| cores.clamp(1, allowed))
}

#[cfg(target_os = "linux")]
fn physical_cores_of_machine() -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        let siblings = entry.path().join("topology/thread_siblings_list");
        if let Ok(text) = std::fs::read_to_string(siblings) {
            cores.insert(text);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(target_os = "macos")]
fn physical_cores_of_machine() -> Option<usize> {
    // The performance cores; where there is one kind only, all of them.
    ["hw.perflevel0.physicalcpu", "hw.physicalcpu"].iter().find_map(|name| {
        let name = std::ffi::CString::new(*name).ok()?;
        let mut cores: libc::c_int = 0;
        let mut size = size_of::<libc::c_int>();
        // SAFETY: the name is a C string, and the value's address and size are those of a c_int.
        let failed = unsafe {
            libc::sysctlbyname(name.as_ptr(), (&raw mut cores).cast(), &mut size, std::ptr::null_mut(), 0)
        };
        usize::try_from(cores).ok().filter(|&cores| failed == 0 && cores > 0)
    })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn physical_cores_of_machine() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_exactly_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for chunks in [0, 1, 2, 6, 33] {
                for _ in 0..50 {
                    let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(chunks, &|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn ranges_cover_the_units_in_whole_quanta() {
        let pool = Pool::new(3);
        for (units, quantum) in [(0, 4), (1, 4), (64, 16), (100, 16), (1000, 1), (7, 0)] {
            let seen = Mutex::new(Vec::new());
            pool.ranges(units, quantum, |r| seen.lock().unwrap().push(r)).unwrap();
            let mut seen = seen.into_inner().unwrap();
            seen.sort_by_key(|r| r.start);
            let mut at = 0;
            for r in seen {
                assert_eq!(r.start, at);
                assert_eq!(r.start % quantum.max(1), 0);
                at = r.end;
            }
            assert_eq!(at, units);
        }
    }

    #[test]
    fn a_panic_in_a_chunk_is_an_error_and_the_pool_survives() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for _ in 0..20 {
                let result = pool.run(6, &|i| assert!(i != 4, "chunk {i} fails"));
                assert_eq!(result, Err(KernelError::Panicked("chunk 4 fails".into())));
                pool.run(6, &|_| ()).unwrap();
            }
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(6, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3 * 200 * 6);
    }

    #[test]
    fn an_operation_started_inside_a_chunk_runs_inline() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(3, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert_eq!(total.into_inner(), 12);
    }

    #[test]
    fn stalled_workers_make_the_pool_work_alone_for_a_growing_while() {
        let mut caller = Caller { alone_until: None, backoff: BACKOFF.start };
        caller.note_wait(Duration::from_micros(100), Duration::from_micros(5));
        assert!(caller.alone_until.is_none(), "a short wait is no stall");
        caller.note_wait(Duration::from_millis(4), Duration::from_millis(3));
        assert!(caller.alone_until.is_none(), "a wait of one long chunk is no stall");
        caller.note_wait(Duration::from_millis(4), Duration::from_micros(20));
        assert!(caller.alone_until.is_some());
        assert_eq!(caller.backoff, BACKOFF.start * 2);
    }

    #[test]
    fn there_is_at_least_one_physical_core() {
        assert!(physical_cores() >= 1);
    }
}
