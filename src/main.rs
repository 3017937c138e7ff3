//! The binary: parse, call, print, exit code. Everything else is in the library.

fn main() -> std::process::ExitCode {
    argodrive::cli::main()
}
