//! Where the image lies: high in the memory below 1 GiB, so that a guest kernel has the low part
//! for itself.

fn main() {
    let directory = env!("CARGO_MANIFEST_DIR");
    println!("cargo:rerun-if-changed={directory}/../bare/image.ld");
    for argument in [
        &format!("-T{directory}/../bare/image.ld"),
        "--defsym=BASE=0x30000000",
        "-no-pie",
        "-static",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    for argument in ["-nostdlib", "--gc-sections", "--build-id=none", "-n"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
