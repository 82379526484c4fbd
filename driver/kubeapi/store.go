package kubeapi

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	etcdserverpb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"drover.io/drover/api"
)

// store is the embedded etcd: one member, one unix socket, no peers.
type store struct {
	endpoint string
	etcd     *embed.Etcd
	log      *slog.Logger
	dir      *os.File // keeps the short socket path alive
	quota    int64
	snaps    string
	taking   sync.Mutex // excludes a second snapshot, which would remove the unfinished first
	saved    int64      // revision of the newest snapshot
	lineage  string     // file beside the database
	start    string     // mark of this start, in the database
	full     atomic.Bool
	quiet    atomic.Bool // during the start etcd's advice is for clusters; during the end etcd's own listeners close
}

// memberName is the only member of the embedded etcd.
const memberName = "drover"

func init() {
	// etcd allocates two log segments ahead; 64 MB each is a lot for a few thousand objects.
	wal.SegmentSizeBytes = 8 << 20
}

func openStore(ctx context.Context, o Options) (*store, error) {
	s := &store{log: o.Log.With("part", "etcd"), quota: o.QuotaBytes, snaps: filepath.Join(o.Dir, "etcd-snapshots")}
	dir := filepath.Join(o.Dir, "etcd")
	for _, d := range []string{dir, s.snaps} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, api.Errorf(api.Unavailable, "etcd: %w", err)
		}
	}
	// A socket's path has at most 107 bytes, and the state folder may be longer: use a descriptor of the folder.
	fd, err := os.Open(dir)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "etcd: %w", err)
	}
	s.dir = fd
	s.endpoint = fmt.Sprintf("unix:///proc/self/fd/%d/client.sock:0", fd.Fd())
	client, err := url.Parse(s.endpoint)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("etcd: %w", err), fd.Close())
	}
	c := embed.NewConfig()
	c.Name, c.Dir = memberName, dir
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	c.ListenPeerUrls = nil // one member has no peers
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	c.SnapshotCount, c.SnapshotCatchUpEntries = 2000, 200 // a short raft log in memory
	// Each tick wakes a processor for an idle server. A single member elects itself within five ticks. etcd syncs the
	// log at every commit, so the database may follow a second later.
	c.TickMs, c.ElectionMs, c.BackendBatchInterval = 200, 1000, time.Second
	c.MaxSnapFiles, c.MaxWalFiles = 2, 2
	c.QuotaBackendBytes = o.QuotaBytes
	c.UnsafeNoFsync = o.Volatile
	c.BootstrapDefragThresholdMegabytes = 64
	c.WatchProgressNotifyInterval = 10 * time.Minute
	// The disk also serves the data, so requests that etcd calls slow are usual under load.
	c.WarningApplyDuration, c.WarningUnaryRequestDuration = 2*time.Second, 2*time.Second
	c.EnableGRPCGateway = false
	c.LogLevel = "warn"
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(zapTo{s.log, &s.quiet}))
	s.quiet.Store(true)
	if s.etcd, err = embed.StartEtcd(c); err != nil {
		return nil, errors.Join(api.Errorf(api.Unavailable, "etcd in %s: %w", dir, err), fd.Close())
	}
	select {
	case <-s.etcd.Server.ReadyNotify():
		s.quiet.Store(false)
		return s, nil
	case err = <-s.etcd.Err():
	case <-s.etcd.Server.StopNotify():
		err = errors.New("etcd stopped")
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(time.Minute):
		err = errors.New("not ready after one minute")
	}
	s.close()
	return nil, api.Errorf(api.Unavailable, "etcd in %s: %w", dir, err)
}

func (s *store) close() {
	if s.start != "" {
		if err := s.recordRevision(true); err != nil {
			s.log.Warn("the revision of the state database was not recorded", "err", err)
		}
	}
	s.quiet.Store(true)
	s.etcd.Close()
	_ = s.dir.Close()
}

// checkQuota defragments a nearly full database, logs the shortage, and clears the alarm once the database has room. A
// full database refuses all writes except writes that free space.
func (s *store) checkQuota(ctx context.Context) {
	be := s.etcd.Server.Backend()
	alarms := s.etcd.Server.Alarms()
	if len(alarms) > 0 {
		// The API server's compaction first writes a key, which the full database refuses: deleted objects would keep
		// their room.
		_, err := s.etcd.Server.Compact(ctx, &etcdserverpb.CompactionRequest{Revision: s.etcd.Server.KV().Rev(),
			Physical: true})
		if err != nil && !errors.Is(err, mvcc.ErrCompacted) {
			s.log.Warn("the state database cannot be compacted", "err", err)
		}
	}
	if be.Size() > s.quota*8/10 && be.SizeInUse() < be.Size()*7/10 {
		if err := be.Defrag(); err != nil {
			s.log.Error("the state database cannot be defragmented", "err", err)
		}
	}
	full := be.Size() > s.quota*8/10
	s.full.Store(full)
	switch {
	case len(alarms) > 0 && !full:
		for _, a := range alarms {
			_, err := s.etcd.Server.Alarm(ctx, &etcdserverpb.AlarmRequest{Action: etcdserverpb.AlarmRequest_DEACTIVATE,
				MemberID: a.MemberID, Alarm: a.Alarm})
			s.log.Info("the state database has room again", "err", err)
		}
	case len(alarms) > 0:
		s.log.Error("the state database is full and refuses writes: delete objects",
			"bytes", be.Size(), "quota", s.quota)
	case full:
		s.log.Warn("the state database is nearly full: delete unneeded objects",
			"bytes", be.Size(), "quota", s.quota)
	}
}

// checkWritable returns the reason why the database refuses writes now or soon.
func (s *store) checkWritable() error {
	if s.full.Load() || len(s.etcd.Server.Alarms()) > 0 {
		return api.Errorf(api.Full, "the state database has reached its quota of %d bytes: delete objects", s.quota)
	}
	return nil
}

const (
	keepSnapshots    = 5
	snapshotInterval = time.Hour
	snapshotPrefix   = "state-"
)

// takeSnapshot copies the database if the database changed and the newest copy is an hour old. A copy has the format of
// `etcdctl snapshot save`: the database and its SHA-256 at the end.
func (s *store) takeSnapshot(now time.Time) error {
	s.taking.Lock()
	defer s.taking.Unlock()
	names, err := s.listSnapshots()
	if err != nil {
		return fmt.Errorf("snapshots of the state database: %w", err)
	}
	rev := s.etcd.Server.KV().Rev()
	if rev == s.saved {
		return nil
	}
	if n := len(names); n > 0 {
		at, err := time.Parse(time.RFC3339, strings.TrimSuffix(strings.TrimPrefix(names[n-1], snapshotPrefix), ".db"))
		if err == nil && now.Sub(at) < snapshotInterval && !at.After(now) {
			return nil
		}
	}
	path := filepath.Join(s.snaps, snapshotPrefix+now.UTC().Format(time.RFC3339)+".db")
	if err := s.saveCopy(path); err != nil {
		return fmt.Errorf("snapshot %s: %w", path, err)
	}
	s.saved = rev
	if names, err = s.listSnapshots(); err != nil {
		return fmt.Errorf("snapshots of the state database: %w", err)
	}
	for len(names) > keepSnapshots {
		if err := os.Remove(filepath.Join(s.snaps, names[0])); err != nil {
			return fmt.Errorf("old snapshot: %w", err)
		}
		names = names[1:]
	}
	return nil
}

func (s *store) saveCopy(path string) (err error) {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(tmp)
		}
	}()
	snap := s.etcd.Server.Backend().Snapshot()
	defer func() { err = errors.Join(err, snap.Close()) }()
	h := sha256.New()
	if _, err = snap.WriteTo(io.MultiWriter(f, h)); err != nil {
		return err
	}
	if _, err = f.Write(h.Sum(nil)); err != nil {
		return err
	}
	if err = errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// listSnapshots returns the names of the copies, oldest first, and removes unfinished copies.
func (s *store) listSnapshots() ([]string, error) {
	dir, err := os.ReadDir(s.snaps)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range dir {
		switch name := e.Name(); {
		case strings.HasSuffix(name, ".tmp"):
			_ = os.Remove(filepath.Join(s.snaps, name))
		case strings.HasPrefix(name, snapshotPrefix):
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names, nil
}

// newDatabase lists etcd's complaints about a database without entries.
var newDatabase = map[string]bool{"Failed to detect schema version": true, "failed to update storage version": true}

// zapTo forwards etcd's log to slog.
type zapTo struct {
	log   *slog.Logger
	quiet *atomic.Bool
}

func (z zapTo) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }
func (z zapTo) Sync() error                  { return nil }
func (z zapTo) With(f []zapcore.Field) zapcore.Core {
	return zapTo{z.log.With(logAttributes(f)...), z.quiet}
}
func (z zapTo) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if z.Enabled(e.Level) {
		return c.AddCore(e, z)
	}
	return c
}
func (z zapTo) Write(e zapcore.Entry, f []zapcore.Field) error {
	level := slog.LevelWarn
	switch {
	case z.quiet.Load() || newDatabase[e.Message]:
		level = slog.LevelDebug
	case e.Level > zapcore.WarnLevel:
		level = slog.LevelError
	}
	z.log.Log(context.Background(), level, e.Message, logAttributes(f)...)
	return nil
}

func logAttributes(fields []zapcore.Field) []any {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	out := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		out = append(out, k, v)
	}
	return out
}
