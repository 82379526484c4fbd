package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
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
	known map[string]*knownNaming // by path of the record
	seen  []*knownNaming          // all that the last look found, those that are not kept, too

	settledMu sync.Mutex
	settled   map[string]layer.FileID // folders of all records of a kind, as they were before they were synced last

	wholeMu sync.Mutex
	whole   map[string]int64 // finished layers that have their checksums, and how long that file is
}

// knownNaming is a naming and the file that it was read from.
type knownNaming struct {
	naming
	path   string
	file   layer.FileID
	steady bool // as long as the file is the same, so is the naming
	lasts  bool // it is durable, or what came after it is; guarded by settledMu
}

// sight is what a look at all records found.
type sight struct {
	all                  []*naming
	records              []*knownNaming // of all
	bare                 []string       // folders without a record, or whose record cannot be read
	ofReplicas, ofImages error          // records that cannot be read
	unlisted             error          // a kind of them that was not even listed
}

// unread is why more may be named than was seen.
func (s *sight) unread() error { return errors.Join(s.ofReplicas, s.ofImages) }

// namings reads what every replica, image and pin on the disk names, and tells of records that cannot be read. The
// caller has the disk's lock.
func (d *Disk) namings() (all []*naming, ofReplicas, ofImages error) {
	s := d.look()
	return s.all, s.ofReplicas, s.ofImages
}

// look looks at every record that names layers. One that is being replaced is seen as it was, or as it will be.
func (d *Disk) look() *sight {
	d.names.mu.Lock()
	defer d.names.mu.Unlock()
	was := d.names.known
	var replicas, images, pins sight
	var wg sync.WaitGroup // two kinds at once: there may be thousands of each
	wg.Go(func() { replicas.ofReplicas = d.lookAt(&replicas, replicaDir, stackFile, was, d.replicaNaming) })
	images.ofImages = d.lookAt(&images, imagesDir, imageFile, was, d.imageNaming)
	wg.Wait()
	pins.ofReplicas = d.lookAt(&pins, pinsDir, pinFile, was, d.pinNaming)
	s := &sight{ofReplicas: errors.Join(replicas.ofReplicas, pins.ofReplicas), ofImages: images.ofImages,
		unlisted: errors.Join(replicas.unlisted, images.unlisted, pins.unlisted),
		records:  slices.Concat(replicas.records, images.records, pins.records),
		bare:     slices.Concat(replicas.bare, images.bare, pins.bare)}
	d.names.known = make(map[string]*knownNaming, len(s.records))
	s.all = make([]*naming, 0, len(s.records))
	for _, k := range s.records {
		if s.all = append(s.all, &k.naming); k.steady {
			d.names.known[k.path] = k
		}
	}
	d.names.seen = s.records
	return s
}

// lookAt looks at the records of one kind. Its error is of those that cannot be read.
func (d *Disk) lookAt(s *sight, kind, record string, was map[string]*knownNaming,
	read func(uid string) (naming, error)) (bad error) {
	entries, err := d.FS.ReadDir(d.Join(kind))
	if kind == pinsDir && errors.Is(err, fs.ErrNotExist) {
		return nil // made with the first of them
	}
	if err != nil {
		s.unlisted = err
		return fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	dir, skip := d.Join(kind)+"/", 0
	at, closeIt := d.OpenFolder(dir)
	defer closeIt()
	if at != unix.AT_FDCWD {
		skip = len(dir)
	}
	s.records = make([]*knownNaming, 0, len(entries))
	for _, e := range entries {
		path := dir + e.Name() + "/" + record
		k := was[path]
		if k == nil && api.UID(e.Name()).Validate() != nil {
			continue
		}
		id, steady, err := d.FileIDAt(at, path[skip:])
		if k == nil || err != nil || k.file != id {
			n, err := read(e.Name())
			if err != nil {
				s.bare = append(s.bare, dir+e.Name())
			}
			if errors.Is(err, fs.ErrNotExist) {
				continue // half-made
			}
			if err != nil {
				bad = errors.Join(bad, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err)))
				continue
			}
			k = &knownNaming{naming: n, path: path, file: id, steady: steady}
		}
		s.records = append(s.records, k)
	}
	return bad
}

// othersName reports for each of the layers whether anything but the replica names it. A record that is known to name a
// layer, and still does, tells without a look at all the others.
func (d *Disk) othersName(layers []string, replica string) (map[string]bool, error) {
	if shared := d.knownShared(layers, replica); len(shared) == len(layers) {
		return shared, nil
	}
	unlock, err := d.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	all, _, _ := d.namings() // what cannot be read is told elsewhere
	shared := map[string]bool{}
	for _, n := range all {
		if n.replica != replica {
			for _, l := range n.layers {
				shared[l] = true
			}
		}
	}
	return shared, nil
}

// knownShared are those of the layers that something but the replica was seen to name, and still does.
func (d *Disk) knownShared(layers []string, replica string) map[string]bool {
	d.names.mu.Lock()
	defer d.names.mu.Unlock()
	left := map[string]bool{}
	for _, l := range layers {
		left[l] = true
	}
	shared := map[string]bool{}
	for _, k := range d.names.seen {
		if k.replica == replica || !slices.ContainsFunc(k.layers, func(l string) bool { return left[l] }) {
			continue
		}
		for _, l := range d.namedNow(k) {
			if left[l] {
				shared[l] = true
				delete(left, l)
			}
		}
	}
	return shared
}

// namedNow is what a record names by now.
func (d *Disk) namedNow(k *knownNaming) []string {
	if id, _, err := d.FileID(k.path); err == nil && k.steady && id == k.file {
		return k.layers
	}
	read, uid := d.pinNaming, k.pin
	if k.replica != "" {
		read, uid = d.replicaNaming, k.replica
	} else if k.image != "" {
		read, uid = d.imageNaming, k.image
	}
	n, err := read(uid)
	if err != nil {
		return nil
	}
	return n.layers
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
