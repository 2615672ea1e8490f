//! A small persistent thread pool for the many short parallel sections of a forward.
//!
//! A forward has some two hundred sections of 10 µs to 1 ms. Workers therefore spin between them and sleep soon after
//! the forward is over: one wake-up per forward instead of one per section, and cores left to other processes.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Polls before a worker sleeps inside a forward: some 100 µs, longer than nearly any gap.
const SPINS: usize = 4_000;
/// Polls after a forward before a worker sleeps: long enough for the next model's forward of the same step to begin.
const SPINS_AT_REST: usize = 1_000;
/// Polls before the caller sleeps until the workers are done. One that lost its core can then take the caller's, which
/// it could not while the caller waits awake, or merely yields.
const CALLER_SPINS: usize = 2_000;

type Section<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    /// Number of the current section; raised to start one.
    epoch: AtomicUsize,
    section: UnsafeCell<Option<Section<'static>>>,
    running: AtomicUsize,
    /// Set while the caller sleeps; the last worker wakes it.
    caller_sleeps: AtomicBool,
    caller: Mutex<Option<Thread>>,
    panicked: AtomicBool,
    /// Whether a forward is under way, so that waiting awake is worth it.
    awake: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `section` is written only while no worker runs (`running == 0`) and read only after the epoch that
// publishes it was observed with acquire ordering.
unsafe impl Sync for Shared {}

/// Threads that run sections of work together with the calling thread.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool of `threads` including the caller's.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            section: UnsafeCell::new(None),
            running: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            caller: Mutex::new(None),
            panicked: AtomicBool::new(false),
            awake: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        // Workers are added to the pool one by one, so that its drop ends those there are when one is refused.
        let mut pool = Self {
            shared,
            workers: Vec::new(),
        };
        for index in 1..threads.max(1) {
            let shared = pool.shared.clone();
            let worker = thread::Builder::new()
                .name(format!("forward-{index}"))
                .spawn(move || work(&shared, index))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads including the caller's.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Wakes the workers, which then wait for sections without sleeping.
    pub(crate) fn rouse(&self) {
        self.shared.awake.store(true, Ordering::Relaxed);
        for worker in &self.workers {
            worker.thread().unpark();
        }
    }

    /// Lets the workers sleep until the next section or [`Self::rouse`].
    pub(crate) fn rest(&self) {
        self.shared.awake.store(false, Ordering::Relaxed);
    }

    /// Runs `section(thread)` once on every thread and returns when all are done.
    ///
    /// # Panics
    /// When a section panics, on whichever thread.
    pub(crate) fn run(&mut self, section: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return section(0);
        }
        let shared = &*self.shared;
        // SAFETY: no worker runs now, and none touches the section after `running` is back to 0 below, which
        // happens before this function returns or unwinds. So the borrow outlives every use.
        unsafe {
            *shared.section.get() = Some(std::mem::transmute::<Section<'_>, Section<'static>>(
                section,
            ));
        }
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::Release);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        let own = catch_unwind(AssertUnwindSafe(|| section(0)));
        shared.wait_for_workers();
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(
            !shared.panicked.swap(false, Ordering::Relaxed),
            "a worker of the forward panicked"
        );
    }

    /// Splits `0..items` into ranges of at most `grain` that the threads take as they become free.
    pub(crate) fn for_ranges(
        &mut self,
        items: usize,
        grain: usize,
        body: &(dyn Fn(Range<usize>) + Sync),
    ) {
        let grain = grain.max(1);
        if items <= grain || self.workers.is_empty() {
            return body(0..items);
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= items {
                    return;
                }
                body(start..items.min(start + grain));
            }
        });
    }
}

impl Shared {
    /// Returns when no worker runs the section any more.
    fn wait_for_workers(&self) {
        for _ in 0..CALLER_SPINS {
            if self.running.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        *self.caller() = Some(thread::current());
        // Either this store comes before the last worker's look at it, or its count is seen here.
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while self.running.load(Ordering::SeqCst) > 0 {
            thread::park();
        }
        self.caller_sleeps.store(false, Ordering::Relaxed);
    }

    /// A worker is done with the section.
    fn finish(&self) {
        let last = self.running.fetch_sub(1, Ordering::SeqCst) == 1;
        if last
            && self.caller_sleeps.load(Ordering::SeqCst)
            && let Some(caller) = &*self.caller()
        {
            caller.unpark();
        }
    }

    /// The thread that sleeps, or slept last.
    fn caller(&self) -> MutexGuard<'_, Option<Thread>> {
        // Nothing panics while it is held.
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            spins += 1;
            let most = match shared.awake.load(Ordering::Relaxed) {
                true => SPINS,
                false => SPINS_AT_REST,
            };
            if spins < most {
                std::hint::spin_loop();
            } else {
                // `unpark` leaves a token when it comes first, so no start is missed.
                thread::park();
                spins = 0;
            }
        }
        seen = seen.wrapping_add(1);
        // SAFETY: the acquire load above saw the epoch that published this section.
        let section = unsafe { *shared.section.get() };
        if let Some(section) = section
            && catch_unwind(AssertUnwindSafe(|| section(index))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.finish();
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker cannot panic outside a section, and those are caught.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once() {
        let mut pool = ThreadPool::new(3).unwrap();
        for round in 0..200 {
            let done = Mutex::new(vec![0; 97]);
            pool.for_ranges(97, 5, &|range| {
                let mut done = done.lock().unwrap();
                range.for_each(|i| done[i] += 1);
            });
            assert!(
                done.into_inner().unwrap().iter().all(|&n| n == 1),
                "round {round}"
            );
        }
    }

    #[test]
    fn a_caller_that_fell_asleep_is_woken() {
        let mut pool = ThreadPool::new(3).unwrap();
        for _ in 0..3 {
            let late = AtomicUsize::new(0);
            pool.run(&|index| {
                if index > 0 {
                    thread::sleep(std::time::Duration::from_millis(5));
                    late.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert_eq!(late.into_inner(), 2);
        }
    }

    #[test]
    fn a_panic_on_a_worker_reaches_the_caller() {
        let mut pool = ThreadPool::new(2).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|thread| assert_ne!(thread, 1, "boom"));
        }));
        assert!(outcome.is_err());
        // The pool is as good as before.
        let runs = AtomicUsize::new(0);
        pool.run(&|_| {
            runs.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(runs.into_inner(), 2);
    }
}
