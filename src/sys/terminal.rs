//! The size of the terminal behind a stream.

use std::os::fd::AsFd;

/// Columns and rows of the terminal behind `stream`; `None` when it is none, or does not tell.
pub fn size(stream: &impl AsFd) -> Option<(usize, usize)> {
    use std::os::fd::AsRawFd;
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open for as long as `stream` is borrowed, and the pointer is to a live winsize, which
    // is what this request fills.
    let rc = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    (rc == 0 && size.ws_col > 0 && size.ws_row > 0).then(|| (usize::from(size.ws_col), usize::from(size.ws_row)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_file_is_no_terminal() {
        assert_eq!(super::size(&tempfile::tempfile().unwrap()), None);
    }
}
