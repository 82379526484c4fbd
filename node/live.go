package node

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// deviceAnswers reports whether a process still serves a device. The device node of a dead server stays, with its size,
// and reads of the kernel's cache succeed: only a read past the cache tells.
func deviceAnswers(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err == nil {
		defer f.Close()
		var page []byte // aligned, as direct reads require
		if page, err = unix.Mmap(-1, 0, api.BlockSize, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_ANON|unix.MAP_PRIVATE); err == nil {
			_, err = unix.Pread(int(f.Fd()), page, 0)
			_ = unix.Munmap(page)
		}
	}
	for _, e := range []unix.Errno{unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENOTCONN} {
		if errors.Is(err, e) {
			return false
		}
	}
	return true
}

// awaitDevice returns the volume's attachment to this node and the device, once the device answers: after a crash the
// attachment names the old device until the new device exists, and another volume may have the old device's number by
// then.
func (s *Server) awaitDevice(ctx context.Context, vol *api.Volume) (*api.Attachment, device, error) {
	for {
		att, err := s.awaitAttachment(ctx, vol.Name)
		if err != nil {
			return nil, device{}, err
		}
		d, err := openDevice(vol.Name, att.Status.Device)
		switch {
		case err != nil:
		case !s.isOf(d, vol.Status.UID):
			err = api.Errorf(api.Unavailable, "device %s is not one of volume %s any more: the volume's new one is awaited",
				d.path, vol.Name)
		case deviceAnswers(d.path):
			return att, d, nil
		default:
			err = api.Errorf(api.Unavailable, "device %s of volume %s does not answer", d.path, vol.Name)
		}
		if _, e := await.Until(ctx, s.client, vol.Name, func(a *api.Attachment) (bool, error) {
			return a.UID != att.UID || a.Status.Device != att.Status.Device || a.Status.Epoch != att.Status.Epoch ||
				a.DeletionTimestamp != nil || !a.Status.Ready, nil
		}); e != nil {
			return nil, device{}, err
		}
	}
}
