//! Unix sockets without waiting, straight from and to the guest's buffers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use libc::iovec;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

/// Up to `limit` bytes of the buffers, from `skip` on.
pub(super) fn part(buffers: &[iovec], mut skip: usize, mut limit: usize, into: &mut Vec<iovec>) {
    into.clear();
    for buffer in buffers {
        let from = skip.min(buffer.iov_len);
        let length = limit.min(buffer.iov_len - from);
        skip -= from;
        limit -= length;
        if length > 0 {
            // SAFETY: `from` is inside the buffer.
            let base = unsafe { buffer.iov_base.cast::<u8>().add(from) };
            into.push(iovec { iov_base: base.cast(), iov_len: length });
        }
        if limit == 0 {
            return;
        }
    }
}

/// Sends what fits; [`io::ErrorKind::WouldBlock`] when nothing does. The buffers are guest memory that is held, or our own.
pub(super) fn send(stream: &UnixStream, buffers: &[iovec]) -> io::Result<usize> {
    let message = message(buffers);
    // SAFETY: the message and its list live during the call, and the buffers are mapped; the kernel only reads them.
    retry(|| unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

/// Receives what is there; 0 at the end, [`io::ErrorKind::WouldBlock`] when there is nothing.
pub(super) fn receive(stream: &UnixStream, buffers: &[iovec]) -> io::Result<usize> {
    let mut message = message(buffers);
    // SAFETY: as for `send`, but that the buffers are written to: they are guest memory that the device may write to.
    retry(|| unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Looks at the first bytes, or takes them.
pub(super) fn receive_bytes(stream: &UnixStream, bytes: &mut [u8], peek: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    // SAFETY: the slice is ours and as long as said.
    retry(|| unsafe { libc::recv(stream.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), flags) })
}

/// Sends bytes of our own.
pub(super) fn send_bytes(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    send(stream, &[own(bytes)])
}

/// Sends from the front of a buffer of our own; what was sent is gone from it.
pub(super) fn drain(stream: &UnixStream, pending: &mut VecDeque<u8>) -> io::Result<usize> {
    let (first, second) = pending.as_slices();
    let sent = send(stream, &[own(first), own(second)])?;
    pending.drain(..sent);
    if pending.is_empty() {
        *pending = VecDeque::new();
    }
    Ok(sent)
}

/// Copies the buffers' bytes behind those that wait.
pub(super) fn keep(buffers: &[iovec], pending: &mut VecDeque<u8>) {
    let mut portion = [0_u8; 1024];
    for buffer in buffers {
        for at in (0..buffer.iov_len).step_by(portion.len()) {
            let count = portion.len().min(buffer.iov_len - at);
            // SAFETY: the range is inside the buffer, which is mapped guest memory; the target is ours.
            unsafe {
                let from = buffer.iov_base.cast::<u8>().add(at);
                std::ptr::copy_nonoverlapping(from, portion.as_mut_ptr(), count);
            }
            pending.extend(&portion[..count]);
        }
    }
}

/// Connects without waiting: a listener that can't take one more refuses.
pub(super) fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(UnixStream::from(stream))
}

fn own(bytes: &[u8]) -> iovec {
    iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn message(buffers: &[iovec]) -> libc::msghdr {
    // SAFETY: all of it may be zeros.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = buffers.as_ptr().cast_mut();
    message.msg_iovlen = buffers.len() as _;
    message
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
