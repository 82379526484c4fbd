package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// naming is what one record says of layers: that somebody needs them.
type naming struct {
	replica, volume string // of a replica
	image           string // or of an image
	pin             string // or of who reads from elsewhere
	layers          []string
}

// namings keeps what records name for as long as their files are the same: whoever removes one of a thousand images
// has to know what all the others name.
type namings struct {
	mu    sync.Mutex
	known map[string]knownNaming // by path of the record
}

type knownNaming struct {
	file fileID
	naming
}

// fileID tells a file from every other that had its name. Records are replaced, never changed in place.
type fileID struct {
	dev, ino     uint64
	size         int64
	mtime, ctime int64
}

// settled is how old a file must be: of a younger one, times may not tell it from its successor.
const settled = 2 * time.Second

// fileID looks at a record; steady is whether it can be told from its successor.
func (d *Disk) fileID(name string) (id fileID, steady bool, err error) {
	if d.fs == file.OS { // straight: this is done for every record on the disk
		var st unix.Stat_t
		if err := retryEINTR(func() error { return unix.Stat(name, &st) }); err != nil {
			return id, false, err
		}
		id = fileID{st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
	} else {
		h, err := d.fs.Open(name, os.O_RDONLY, 0)
		if err != nil {
			return id, false, err
		}
		defer h.Close()
		info, err := h.Stat()
		if err != nil {
			return id, false, err
		}
		st, is := info.Sys().(*syscall.Stat_t)
		if !is {
			return id, false, nil
		}
		id = fileID{st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
	}
	return id, time.Since(time.Unix(0, id.ctime)) > settled, nil
}

// namings reads what every replica, image and pin on the disk names, and tells of records that cannot be read. The
// caller has the disk's lock.
func (d *Disk) namings() (all []naming, ofReplicas, ofImages error) {
	d.names.mu.Lock()
	defer d.names.mu.Unlock()
	known := map[string]knownNaming{}
	for _, kind := range []struct {
		dir, file string
		read      func(uid string) (naming, error)
		bad       *error
	}{{replicaDir, stackFile, d.replicaNaming, &ofReplicas}, {imagesDir, imageFile, d.imageNaming, &ofImages},
		{pinsDir, pinFile, d.pinNaming, &ofReplicas}} {
		entries, err := d.fs.ReadDir(d.path(kind.dir))
		if kind.dir == pinsDir && errors.Is(err, fs.ErrNotExist) {
			continue // made with the first of them
		}
		if err != nil {
			*kind.bad = fmt.Errorf("disk %s: %w", d.root, classify(err))
			continue
		}
		for _, e := range entries {
			if api.UID(e.Name()).Validate() != nil {
				continue
			}
			name := d.path(kind.dir, e.Name(), kind.file)
			id, steady, err := d.fileID(name)
			if k, ok := d.names.known[name]; ok && err == nil && k.file == id {
				known[name] = k
				all = append(all, k.naming)
				continue
			}
			n, err := kind.read(e.Name())
			if errors.Is(err, fs.ErrNotExist) {
				continue // half-made
			}
			if err != nil {
				*kind.bad = errors.Join(*kind.bad, fmt.Errorf("disk %s: %w", d.root, classify(err)))
				continue
			}
			if steady {
				known[name] = knownNaming{id, n}
			}
			all = append(all, n)
		}
	}
	d.names.known = known
	return all, ofReplicas, ofImages
}

// sizeOnDisk is what a file takes.
func (d *Disk) sizeOnDisk(name string) (int64, error) {
	if d.fs == file.OS { // straight: this is done for every layer
		var st unix.Stat_t
		err := retryEINTR(func() error { return unix.Stat(name, &st) })
		return st.Blocks * 512, err
	}
	h, err := d.fs.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return 0, err
	}
	return allocated(st), nil
}

func (d *Disk) imageNaming(uid string) (naming, error) {
	img, err := d.image(uid)
	return naming{image: uid, layers: img.Layers}, err
}

func (d *Disk) replicaNaming(uid string) (naming, error) {
	m, err := d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		was, werr := d.written(uid)
		switch {
		case werr != nil:
			err = werr
		case was:
			err = api.Errorf(api.Corrupt, "replica %s holds data, but its %s is missing", uid, stackFile)
		}
	}
	return naming{replica: uid, volume: m.Volume, layers: m.all()}, err
}
