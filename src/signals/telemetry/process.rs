//! Metrics of this process, from Linux's /proc; none on other systems.

use metrics::{counter, gauge};
use procfs::{FromRead, process::Process};

/// Reads and sets them. What cannot be read keeps its last value.
pub fn collect() {
    if let Err(error) = read() {
        tracing::debug!(%error, "metrics of the process were not read");
    }
}

fn read() -> procfs::ProcResult<()> {
    let process = Process::myself()?;
    let stat = process.stat()?;
    let ticks = procfs::ticks_per_second();
    let started = procfs::boot_time_secs()? + stat.starttime / ticks;
    counter!(super::PROCESS_CPU_SECONDS).absolute((stat.utime + stat.stime) / ticks);
    gauge!(super::PROCESS_START).set(started as f64);
    gauge!(super::PROCESS_RESIDENT_BYTES).set((stat.rss * procfs::page_size()) as f64);
    gauge!(super::PROCESS_THREADS).set(stat.num_threads as f64);
    gauge!(super::PROCESS_OPEN_FDS).set(process.fd_count()? as f64);
    let limits = procfs::process::Limits::from_file("/proc/self/limits")?;
    if let procfs::process::LimitValue::Value(max) = limits.max_open_files.soft_limit {
        gauge!(super::PROCESS_MAX_FDS).set(max as f64);
    }
    Ok(())
}
