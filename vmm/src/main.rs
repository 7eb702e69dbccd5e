//! `torpor-vmm`: one process, one VM. See [`torpor_vmm::process`].

use std::process::ExitCode;

fn main() -> ExitCode {
    torpor_vmm::process::main(std::env::args_os())
}
