package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Files of a replica's folder. Head files carry the name that stack.json gives to the head.
const (
	stackFile   = "stack.json"
	formatStack = "drover-stack"
	ownerFile   = "lock"
	intentsFile = "intents"
	firstHead   = "head"
	dataSuffix  = ".data"
	zeroSuffix  = ".zero"
)

// Meta is the record of a replica, which describes the replica without an API server.
type Meta struct {
	UID         string
	Volume      string // the name users know
	VolumeUID   string
	Size        int64
	Epoch       int64 // of the last adopted session
	Incarnation int64
	Members     []string   // uids of the volume's members in this epoch
	Dirty       bool       // the last adopted session has no clean end yet
	Layers      []string   // bottom first
	Head        string     // name of the head's files
	Snapshots   []Snapshot // names of sealed layers
	Branches    []Branch   // layers beside the head's, for snapshots, after a revert
	Merge       *Merge     // the merge in progress
	Created     time.Time
	BootID      string // the machine's boot at the time of the last ADOPT
	MountID     string // the mount of the disk's file system at that time
	Joined      int64  // the last epoch in which the replica was adopted as a member
	Reverted    int64  // the epoch of the last revert
	EngineNode  string // the node of the engine that adopted the epoch; empty: unknown, only the API tells
	// Object is the API's object of the volume at the last Note, opaque here, for `drover recover`.
	Object json.RawMessage
}

// Snapshot gives a layer of the stack a name.
type Snapshot struct {
	UID     string    `json:"uid"`
	Name    string    `json:"name"`
	Layer   string    `json:"layer"`
	Created time.Time `json:"created"`
}

// Branch is a layer beside the head's, with the one below it; empty: none.
type Branch struct {
	Layer string `json:"layer"`
	Below string `json:"below"`
}

// stackRecord is stack.json.
type stackRecord struct {
	UID         string          `json:"uid"`
	Volume      string          `json:"volume"`
	VolumeUID   string          `json:"volumeUID"`
	Size        int64           `json:"size"`
	Epoch       int64           `json:"epoch"`
	Incarnation int64           `json:"incarnation"`
	Members     []memberRecord  `json:"members"`
	Winner      string          `json:"winner"` // always empty; nothing reads it
	Dirty       bool            `json:"dirty"`
	Layers      []string        `json:"layers"`
	Head        string          `json:"head"`
	Snapshots   []Snapshot      `json:"snapshots"`
	Branches    []Branch        `json:"branches,omitempty"`
	Merge       *Merge          `json:"merge,omitempty"`
	Created     time.Time       `json:"created"`
	BootID      string          `json:"bootID,omitempty"`
	MountID     string          `json:"mountID,omitempty"`
	Joined      int64           `json:"joined,omitempty"`
	Reverted    int64           `json:"reverted,omitempty"`
	EngineNode  string          `json:"engineNode,omitempty"`
	Object      json.RawMessage `json:"object,omitempty"`
}

// memberRecord is one member: an id without an address.
type memberRecord struct {
	ID string `json:"id"`
}

func (m Meta) toRecord() stackRecord {
	members := make([]memberRecord, len(m.Members))
	for i, id := range m.Members {
		members[i].ID = id
	}
	return stackRecord{m.UID, m.Volume, m.VolumeUID, m.Size, m.Epoch, m.Incarnation, members, "", m.Dirty,
		append([]string{}, m.Layers...), m.Head, append([]Snapshot{}, m.Snapshots...), m.Branches, m.Merge,
		m.Created, m.BootID, m.MountID, m.Joined, m.Reverted, m.EngineNode, m.Object}
}

func (s stackRecord) toMeta() Meta {
	members := make([]string, len(s.Members))
	for i, m := range s.Members {
		members[i] = m.ID
	}
	return Meta{s.UID, s.Volume, s.VolumeUID, s.Size, s.Epoch, s.Incarnation, members, s.Dirty, s.Layers,
		s.Head, s.Snapshots, s.Branches, s.Merge, s.Created, s.BootID, s.MountID, s.Joined, s.Reverted, s.EngineNode,
		s.Object}
}

func (m Meta) clone() Meta {
	m.Members, m.Layers, m.Snapshots = slices.Clone(m.Members), slices.Clone(m.Layers), slices.Clone(m.Snapshots)
	m.Object, m.Branches = slices.Clone(m.Object), slices.Clone(m.Branches)
	return m
}

// validate refuses a record that this program never writes, even with a right checksum.
func (m Meta) validate() error {
	if err := api.UID(m.UID).Validate(); err != nil {
		return err
	}
	if m.Size <= 0 || m.Size%blockSize != 0 || m.Size > api.MaxVolumeSize {
		return api.Errorf(api.Corrupt, "size %d", m.Size)
	}
	if !headName(m.Head) {
		return api.Errorf(api.Corrupt, "head %q", m.Head)
	}
	if len(m.Layers) > maxLayers {
		return api.Errorf(api.Corrupt, "%d layers", len(m.Layers))
	}
	for _, uid := range m.Layers {
		if err := api.UID(uid).Validate(); err != nil {
			return err
		}
	}
	if g := m.Merge; g != nil {
		k := slices.Index(m.Layers, g.Lower)
		below := k >= 0 && k+1 < len(m.Layers) && m.Layers[k+1] == g.Upper
		beside := k < 0 && slices.Contains(m.Branches, Branch{g.Upper, g.Lower}) &&
			slices.ContainsFunc(m.Branches, func(b Branch) bool { return b.Layer == g.Lower })
		if !below && !beside || g.Done < 0 || g.Mapped < 0 {
			return api.Errorf(api.Corrupt, "the layers of the merge are no neighbours")
		}
	}
	for _, b := range m.Branches {
		if err := api.UID(b.Layer).Validate(); err != nil {
			return err
		}
	}
	for _, s := range m.Snapshots {
		if _, err := m.Chain(s.Layer); err != nil {
			return err
		}
	}
	return nil
}

// headName accepts "head" and "head-" with digits.
func headName(s string) bool {
	if s == firstHead {
		return true
	}
	if len(s) < 6 || s[:5] != "head-" || len(s) > 24 {
		return false
	}
	for _, c := range s[5:] {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// Spec describes the replica that CreateReplica makes.
type Spec struct {
	UID       string
	Volume    string // name of the volume
	VolumeUID string
	Size      int64    // bytes, a multiple of 4 KiB
	Layers    []string // finished layers of this disk, or of a source; bottom first
	Object    json.RawMessage
	// Set for the successor of another replica:
	Snapshots []Snapshot
	Branches  []Branch
}

// CreateReplica makes a replica with an empty head over the layers. An existing replica that matches, or has grown
// since, is no error; a different one is an error of kind exists.
func (d *Disk) CreateReplica(ctx context.Context, s Spec) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create replica %s on disk %s: %w", s.UID, d.Root, diskfs.Classify(err))
		}
	}()
	m := Meta{UID: s.UID, Volume: s.Volume, VolumeUID: s.VolumeUID, Size: s.Size, Layers: slices.Clone(s.Layers),
		Head: firstHead, Created: time.Now().UTC().Truncate(time.Second), Object: s.Object,
		Snapshots: slices.Clone(s.Snapshots), Branches: slices.Clone(s.Branches)}
	if err := m.validate(); err != nil {
		return api.Errorf(api.Invalid, "%w", err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	remote, err := d.RemoteSizes(m.AllLayers()) // without the lock: other disks may hang
	if err != nil {
		return err
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	have, err := d.readStack(s.UID)
	if err == nil {
		if have.VolumeUID != s.VolumeUID || have.Size < s.Size || !startsWith(have.Layers, s.Layers) {
			return api.Errorf(api.Exists, "a different replica of volume %s (%s) exists", have.Volume, have.VolumeUID)
		}
		return d.FS.SyncDir(d.Join(replicaDir, s.UID)) // a process that died may have written stack.json a moment ago
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, uid := range m.AllLayers() {
		size, err := d.SizeOf(uid)
		if n, is := remote[uid]; is && api.Is(err, api.NotFound) {
			size, err = n, nil
		}
		if err != nil {
			return fmt.Errorf("layer %s: %w", uid, err)
		}
		if size > s.Size {
			return api.Errorf(api.Invalid, "layer %s has %d bytes, which is more than the volume's %d", uid, size, s.Size)
		}
	}
	if was, err := d.headHoldsData(s.UID); err != nil {
		return err
	} else if was {
		return api.Errorf(api.Corrupt, "the folder holds data, but %s is missing", stackFile)
	}
	return d.makeReplica(m)
}

func startsWith(have, want []string) bool {
	return len(have) >= len(want) && slices.Equal(have[:len(want)], want)
}

// makeReplica makes the folder. The rename of stack.json commits; makeReplica replaces a folder without the file.
func (d *Disk) makeReplica(m Meta) error {
	dir := d.Join(replicaDir, m.UID)
	if err := file.RemoveAll(d.FS, dir); err != nil {
		return err
	}
	if err := d.FS.Mkdir(dir, 0o700); err != nil {
		return err
	}
	head, err := d.FS.Open(dir+"/"+m.Head+dataSuffix, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = diskfs.AtOnce(func() error { return errors.Join(head.Truncate(m.Size), head.Datasync(), head.Close()) },
		func() error { return format.WriteFile(d.FS, dir+"/"+m.Head+zeroSuffix, format.ZeroHeader()) },
		func() error {
			return format.WriteFile(d.FS, dir+"/"+intentsFile, format.EncodeIntents(format.NewIntents(m.Size)))
		})
	if err != nil {
		return err
	}
	// All names are durable before stack.json.
	if err := d.SyncDirs(dir, d.Join(replicaDir)); err != nil {
		return err
	}
	// Without the reserve: a full disk gets no new replica.
	return format.WriteMeta(d.FS, dir+"/"+stackFile, formatStack, m.toRecord())
}

func (d *Disk) readStack(uid string) (Meta, error) {
	if err := api.UID(uid).Validate(); err != nil {
		return Meta{}, err
	}
	var rec stackRecord
	if err := format.ReadMeta(d.FS, d.Join(replicaDir, uid, stackFile), formatStack, &rec); err != nil {
		return Meta{}, err
	}
	m := rec.toMeta()
	if err := m.validate(); err != nil {
		return Meta{}, api.Errorf(api.Corrupt, "%s of replica %s: %w", stackFile, uid, err)
	}
	if m.UID != uid {
		return Meta{}, api.Errorf(api.Corrupt, "%s of replica %s is the record of %s", stackFile, uid, m.UID)
	}
	return m, nil
}

// Holds reports whether the replica is on the disk. An unreadable record is an error.
func (d *Disk) Holds(uid string) (bool, error) {
	_, err := d.readStack(uid)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	}
	return false, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
}

// Replicas lists the replicas on the disk. The error names unreadable records; the list has the other replicas all the
// same.
func (d *Disk) Replicas() ([]Meta, error) {
	entries, err := d.FS.ReadDir(d.Join(replicaDir))
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	var list []Meta
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		m, err := d.readStack(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			var was bool
			if was, err = d.headHoldsData(e.Name()); !was && err == nil {
				continue // half-made
			}
			if was {
				err = api.Errorf(api.Corrupt, "replica %s holds data, but its %s is missing", e.Name(), stackFile)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err)))
			continue
		}
		list = append(list, m)
	}
	return list, errors.Join(errs...)
}

// headHoldsData reports whether a head of the replica holds data: then stack.json existed once, because no write comes
// before.
func (d *Disk) headHoldsData(uid string) (bool, error) {
	dir := d.Join(replicaDir, uid)
	entries, err := d.FS.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), dataSuffix) {
			continue
		}
		h, err := d.FS.Open(dir+"/"+e.Name(), os.O_RDONLY, 0)
		if err != nil {
			return false, err
		}
		from, _, err := file.NextData(int(h.Fd()), 0, math.MaxInt64)
		if err := errors.Join(err, h.Close()); err != nil {
			return false, err
		}
		if from < math.MaxInt64 {
			return true, nil
		}
	}
	return false, nil
}

// LastWrite is the time of the last change of a replica's head.
func (d *Disk) LastWrite(uid string) (time.Time, error) {
	m, err := d.readStack(uid)
	if err != nil {
		return time.Time{}, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	st, err := os.Stat(d.Join(replicaDir, uid, m.Head+dataSuffix))
	if err != nil {
		return time.Time{}, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	return st.ModTime(), nil
}
