//! The `fencepost` binary.

use std::process::ExitCode;

use fencepost::cli::{self, Cli};
use fencepost_net::tls;
use fencepost_store::faults;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    tls::install();
    let _faults = faults::set_up();
    // Twenty thousand parked polls need as many file descriptors; the usual limit is a thousand.
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    match Cli::read().run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // For a person at a terminal: the error and its causes, without code locations.
            eprintln!("fencepost: {error:#}");
            ExitCode::from(cli::exit_code(&error))
        }
    }
}
