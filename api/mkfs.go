package api

// MkfsCommand returns the command that makes a filesystem on a blank volume, without the volume's MkfsParams and the
// device; nil: no such filesystem. No discard, because the device is blank; lazy, because the kernel zeroes inode
// tables when there is nothing else to do.
func MkfsCommand(fsType string) []string {
	switch fsType {
	case "ext4":
		return []string{"mkfs.ext4", "-F", "-q", "-m0", "-b4096", "-Enodiscard,lazy_itable_init=1,lazy_journal_init=1"}
	case "xfs":
		return []string{"mkfs.xfs", "-f", "-q", "-K", "-ssize=4096", "-bsize=4096"}
	case "btrfs":
		return []string{"mkfs.btrfs", "-f", "-q", "-K"}
	}
	return nil
}
