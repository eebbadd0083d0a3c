//! Every system call with a pointer.
//!
//! UNSAFETY: system calls, some of which have the kernel access memory of this process later.
#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::uapi::{
    Call, IotlbMsg, MemoryTable, Plain, RingAddr, SET_MEM_TABLE, SET_OWNER, SET_VRING_ADDR, UPDATE,
};

fn answer(returned: libc::c_int) -> io::Result<()> {
    match returned {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a call whose argument is read by the kernel and names no memory.
pub fn set<T: Plain>(file: &File, call: &Call<T>, argument: &T) -> io::Result<()> {
    assert!(
        call.number != SET_VRING_ADDR.number,
        "it has a function of its own"
    );
    // SAFETY: `call` pairs the number with the structure that the header names for it (`uapi`), of
    // which the kernel reads as many bytes as the number says; none of these calls concerns memory
    // elsewhere.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, std::ptr::from_ref(argument)) })
}

/// Makes a call whose argument the kernel fills in.
pub fn get<T: Plain>(file: &File, call: &Call<T>, mut argument: T) -> io::Result<T> {
    // SAFETY: as of `set`; the kernel writes as many bytes as the number says, and any bytes are a
    // value of a `Plain` type.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            call.number,
            std::ptr::from_mut(&mut argument),
        )
    })?;
    Ok(argument)
}

/// Makes the device this process's.
pub fn set_owner(file: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), SET_OWNER, 0) })
}

/// Sets the memory that the kernel may access.
///
/// # Safety
/// All of it is mapped memory until `file` is closed, and no code has references into it.
pub unsafe fn set_memory(file: &File, table: &MemoryTable) -> io::Result<()> {
    assert!(
        table.regions as usize <= table.region.len(),
        "as many regions as there are"
    );
    // SAFETY: the kernel reads the head and as many regions as it says, all within `table`; what
    // they name is the caller's word.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            SET_MEM_TABLE.number,
            std::ptr::from_ref(table),
        )
    })
}

/// Sets the place of a ring.
///
/// # Safety
/// As of [`set_memory`], where the addresses are not IOVAs, which are looked up when they are used.
pub unsafe fn set_ring_addr(file: &File, addr: &RingAddr) -> io::Result<()> {
    // SAFETY: the kernel reads one structure; what it names is the caller's word.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            SET_VRING_ADDR.number,
            std::ptr::from_ref(addr),
        )
    })
}

/// Sends the IOTLB a message.
///
/// # Safety
/// As of [`set_memory`], of what an update maps with an access.
pub unsafe fn tell_iotlb(file: &File, message: &IotlbMsg) -> io::Result<()> {
    debug_assert!(message.what >= UPDATE, "what a front end says");
    // SAFETY: as many bytes as the structure has, all of them initialised (`Plain`); what they name
    // is the caller's word.
    let written = unsafe {
        libc::write(
            file.as_raw_fd(),
            std::ptr::from_ref(message).cast(),
            size_of::<IotlbMsg>(),
        )
    };
    match usize::try_from(written) {
        Ok(len) if len == size_of::<IotlbMsg>() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Returns the next message, of a descriptor that does not wait.
pub fn ask_iotlb(file: &File) -> io::Result<Option<IotlbMsg>> {
    let mut message = IotlbMsg::default();
    // SAFETY: the kernel writes at most as many bytes as the structure has, and any bytes are a
    // value of it.
    let read = unsafe {
        libc::read(
            file.as_raw_fd(),
            std::ptr::from_mut(&mut message).cast(),
            size_of::<IotlbMsg>(),
        )
    };
    match usize::try_from(read) {
        Ok(len) if len == size_of::<IotlbMsg>() => Ok(Some(message)),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}
