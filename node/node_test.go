package node_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
	"drover.io/drover/node"
)

const nodeName = "node-a"

var (
	store client.WithWatch
	door  *node.Server
)

// TestMain runs a single API server for all tests. The devices are the kernel's loop devices, and the tests write the
// data role's status.
func TestMain(m *testing.M) {
	suite.SystemMain()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "drover-node-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		ctx, cancel := context.WithCancel(context.Background())
		server, err := kubeapi.Start(ctx, kubeapi.Options{Dir: dir, Volatile: true})
		if err != nil {
			panic(err)
		}
		scheme := runtime.NewScheme()
		if err := api.AddToScheme(scheme); err != nil {
			panic(err)
		}
		if store, err = client.NewWithWatch(server.Config, client.Options{Scheme: scheme}); err != nil {
			panic(err)
		}
		door = node.New(store, nodeName).TakeAny()
		code := m.Run()
		cancel()
		if err := server.Wait(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		return code
	}())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func wantKind(t *testing.T, err error, k api.Kind, words ...string) {
	t.Helper()
	if !api.Is(err, k) {
		t.Fatalf("error %v is of kind %v, want %v", err, api.KindOf(err), k)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// volume is an attached volume of a test, with the paths of a CO.
type volume struct {
	t                        *testing.T
	name, file, dev          string
	staging, target, target2 string
	vol                      *api.Volume
	att                      *api.Attachment
}

// attach makes a blank volume of size bytes on a loop device.
func attach(t *testing.T, size int64, readOnly bool) *volume {
	t.Helper()
	name := strings.NewReplacer("/", "-", "_", "-", ",", "").Replace(t.Name())
	return attachNamed(t, strings.ToLower(name), size, readOnly)
}

func attachNamed(t *testing.T, name string, size int64, readOnly bool) *volume {
	t.Helper()
	dir := t.TempDir()
	v := &volume{t: t, name: name, file: filepath.Join(dir, "image"), staging: filepath.Join(dir, "staging"),
		target: filepath.Join(dir, "target"), target2: filepath.Join(dir, "other target")}
	f, err := os.Create(v.file)
	must(t, err)
	must(t, f.Truncate(size))
	must(t, f.Close())
	must(t, os.Mkdir(v.staging, 0o700))
	v.vol = &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: api.VolumeSpec{Size: size}}
	must(t, store.Create(t.Context(), v.vol))
	v.loop(readOnly, true)
	t.Cleanup(func() {
		for _, p := range []string{v.target, v.target2, v.staging} {
			for exec.Command("umount", "-l", p).Run() == nil {
			}
		}
		v.detach()
		_ = os.Remove(filepath.Join("/dev/drover-published", name)) // the test may leave the volume published
		_ = os.Remove("/dev/drover-published")                      // if the folder is empty
		if err := store.Delete(context.Background(), v.vol); err != nil {
			t.Error(err)
		}
	})
	return v
}

// loop makes the device and an Attachment for the device.
func (v *volume) loop(readOnly, blank bool) {
	v.t.Helper()
	args := []string{"losetup", "--find", "--show", "--direct-io=on"}
	if readOnly {
		args = append(args, "--read-only")
	}
	v.dev = sh(v.t, append(args, v.file)...)
	ctx := context.Background()
	v.att = &api.Attachment{
		ObjectMeta: metav1.ObjectMeta{Name: v.name, Annotations: map[string]string{api.AnnotationDoor: "csi"}},
		Spec:       api.AttachmentSpec{Volume: v.name, Node: nodeName, ReadOnly: readOnly}}
	must(v.t, store.Create(ctx, v.att))
	v.att.Status = api.AttachmentStatus{Ready: true, Device: v.dev, Size: v.vol.Spec.Size, Blank: blank}
	must(v.t, store.Status().Update(ctx, v.att))
}

func (v *volume) detach() {
	if v.dev == "" {
		return
	}
	sh(v.t, "losetup", "-d", v.dev)
	v.dev = ""
	must(v.t, store.Delete(context.Background(), v.att))
}

// grow makes volume and device larger.
func (v *volume) grow(size int64) {
	v.t.Helper()
	ctx := v.t.Context()
	must(v.t, os.Truncate(v.file, size))
	if v.dev != "" {
		sh(v.t, "losetup", "-c", v.dev)
		must(v.t, store.Get(ctx, client.ObjectKeyFromObject(v.att), v.att))
		v.att.Status.Size = size
		must(v.t, store.Status().Update(ctx, v.att))
	}
	must(v.t, store.Get(ctx, client.ObjectKeyFromObject(v.vol), v.vol))
	v.vol.Spec.Size = size
	must(v.t, store.Update(ctx, v.vol))
}

func (v *volume) annotation(key string) string {
	v.t.Helper()
	must(v.t, store.Get(v.t.Context(), client.ObjectKeyFromObject(v.vol), v.vol))
	return v.vol.Annotations[key]
}

func (v *volume) annotate(key, value string) {
	v.t.Helper()
	must(v.t, store.Get(v.t.Context(), client.ObjectKeyFromObject(v.vol), v.vol))
	v.vol.Annotations = map[string]string{key: value}
	must(v.t, store.Update(v.t.Context(), v.vol))
}

const writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER

func mounted(fs string, mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fs, MountFlags: flags}},
	}
}

func raw(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

func (v *volume) stage(c *csi.VolumeCapability) error {
	_, err := door.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.name,
		StagingTargetPath: v.staging, VolumeCapability: c})
	return err
}

func (v *volume) publish(c *csi.VolumeCapability, target string, readOnly bool) error {
	_, err := door.NodePublishVolume(v.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.name,
		StagingTargetPath: v.staging, TargetPath: target, VolumeCapability: c, Readonly: readOnly})
	return err
}

func (v *volume) unpublish(target string) error {
	_, err := door.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.name,
		TargetPath: target})
	return err
}

func (v *volume) unstage() error {
	_, err := door.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.name,
		StagingTargetPath: v.staging})
	return err
}

func (v *volume) expand(size int64) error {
	_, err := door.NodeExpandVolume(v.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: v.name, VolumePath: v.target,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	return err
}

func (v *volume) stats() (*csi.NodeGetVolumeStatsResponse, error) {
	return door.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.name,
		VolumePath: v.target})
}

func (v *volume) total() int64 {
	v.t.Helper()
	r, err := v.stats()
	must(v.t, err)
	return r.Usage[0].Total
}

const mib = 1 << 20

// TestFilesystems: a volume passes its whole life with each file system, every call twice, and the data survives until
// the second round.
func TestFilesystems(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			v := attach(t, 512*mib, false)
			c := mounted(fs, writer, "noatime")
			content := bytes.Repeat([]byte(fs), 1<<20)
			for round := range 2 {
				for range 2 {
					must(t, v.stage(c))
				}
				if v.annotation(api.AnnotationFS) != fs || v.annotation(api.AnnotationMkfs) != "" {
					t.Errorf("annotations %v do not say that %s was made", v.vol.Annotations, fs)
				}
				for range 2 {
					must(t, v.publish(c, v.target, false))
				}
				if opts := sh(t, "findmnt", "-no", "FSTYPE,OPTIONS", v.target); !strings.HasPrefix(opts, fs) ||
					!strings.Contains(opts, "noatime") {
					t.Errorf("mounted as %s", opts)
				}
				file := filepath.Join(v.target, "file")
				if round == 0 {
					must(t, os.WriteFile(file, content, 0o600))
				} else if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, content) {
					t.Errorf("the data is not there after unstaging and staging: %v", err)
				}
				if n := v.total(); n < 350*mib || n > 512*mib {
					t.Errorf("statistics say %d bytes", n)
				}
				for range 2 {
					must(t, v.unpublish(v.target))
				}
				if _, err := os.Lstat(v.target); !os.IsNotExist(err) {
					t.Errorf("the target path is still there: %v", err)
				}
				for range 2 {
					must(t, v.unstage())
				}
				if round == 0 { // as after a pod has moved away and come back
					v.detach()
					v.loop(false, false)
				}
			}
		})
	}
}

func TestMkfsOptions(t *testing.T) {
	v := attach(t, 64*mib, false)
	v.vol.Spec.MkfsParams = "-L  golden -i 65536"
	must(t, store.Update(t.Context(), v.vol))
	must(t, v.stage(mounted("", writer)))
	if l := sh(t, "blkid", "-p", "-o", "value", "-s", "LABEL", v.dev); l != "golden" {
		t.Errorf("label %q: mkfsParams were not used", l)
	}
}

// TestMkfsFails: after a failed mkfs, a stage with working options succeeds.
func TestMkfsFails(t *testing.T) {
	v := attach(t, 64*mib, false)
	v.vol.Spec.MkfsParams = "--no-such-option"
	must(t, store.Update(t.Context(), v.vol))
	wantKind(t, v.stage(mounted("ext4", writer)), api.Invalid, "mkfs.ext4")
	if v.annotation(api.AnnotationMkfs) != "ext4" {
		t.Error("that a file system is being made was not recorded")
	}
	v.vol.Spec.MkfsParams = ""
	must(t, store.Update(t.Context(), v.vol))
	must(t, v.stage(mounted("ext4", writer)))
}

// TestNeverOverData: a stage never makes a file system over data, even if the volume looks blank.
func TestNeverOverData(t *testing.T) {
	scribble := func(v *volume, off int64) {
		f, err := os.OpenFile(v.dev, os.O_WRONLY, 0)
		must(v.t, err)
		_, err = f.WriteAt(bytes.Repeat([]byte("precious"), 512), off)
		must(v.t, err)
		must(v.t, f.Sync())
		must(v.t, f.Close())
	}
	unchanged := func(v *volume, off int64) {
		f, err := os.Open(v.file)
		must(v.t, err)
		defer f.Close()
		b := make([]byte, 4096)
		_, err = f.ReadAt(b, off)
		must(v.t, err)
		if !bytes.Equal(b, bytes.Repeat([]byte("precious"), 512)) {
			v.t.Fatal("data was overwritten")
		}
	}
	for _, c := range []struct {
		name  string
		setup func(v *volume)
		kind  api.Kind
	}{
		{"map says data", func(v *volume) { scribble(v, 8*mib); v.detach(); v.loop(false, false) }, api.InUse},
		{"written past all doors", func(v *volume) { scribble(v, 8*mib) }, api.InUse},
		{"used as a block device", func(v *volume) {
			must(v.t, v.stage(raw(writer)))
			scribble(v, 12*mib+8192)
		}, api.InUse},
		{"attached by hand", func(v *volume) {
			v.att.Annotations = nil
			must(v.t, store.Update(v.t.Context(), v.att))
			scribble(v, 12*mib+8192)
		}, api.InUse},
		{"had a file system", func(v *volume) {
			v.annotate(api.AnnotationFS, "ext4")
			scribble(v, 8*mib)
		}, api.Corrupt},
		{"partitions", func(v *volume) {
			scribble(v, 8*mib)
			mbr := make([]byte, 512)
			copy(mbr[446:], []byte{0, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0}) // a partition of Linux
			copy(mbr[510:], []byte{0x55, 0xaa})
			f, err := os.OpenFile(v.dev, os.O_WRONLY, 0)
			must(v.t, err)
			_, err = f.WriteAt(mbr, 0)
			must(v.t, err)
			must(v.t, f.Close())
		}, api.InUse},
		{"another file system", func(v *volume) {
			sh(v.t, "mkfs.ext4", "-q", "-F", v.dev)
			scribble(v, 60*mib)
		}, api.InUse},
		{"half made, but another file system is there", func(v *volume) {
			v.annotate(api.AnnotationMkfs, "xfs")
			sh(v.t, "mkfs.ext4", "-q", "-F", v.dev)
			scribble(v, 60*mib)
		}, api.InUse},
		{"used as a block device after half a mkfs", func(v *volume) {
			v.annotate(api.AnnotationMkfs, "xfs")
			must(v.t, v.stage(raw(writer)))
			scribble(v, 8*mib)
		}, api.InUse},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := attach(t, 512*mib, false)
			c.setup(v)
			wantKind(t, v.stage(mounted("xfs", writer)), c.kind)
			off := int64(8 * mib)
			if c.name == "used as a block device" || c.name == "attached by hand" {
				off = 12*mib + 8192
			}
			if strings.Contains(c.name, "another") {
				off = 60 * mib
			}
			unchanged(v, off)
		})
	}
}

// TestHalfMade: an interrupted mkfs runs again, also when the map shows written blocks; a complete file system with a
// remaining mark is kept.
func TestHalfMade(t *testing.T) {
	v := attach(t, 512*mib, false)
	v.annotate(api.AnnotationMkfs, "xfs")
	sh(t, "mkfs.xfs", "-q", "-f", "-K", v.dev)
	sh(t, "dd", "if=/dev/zero", "of="+v.dev, "bs=1M", "seek=200", "count=100", "oflag=direct") // the log and more
	v.detach()
	v.loop(false, false)
	must(t, v.stage(mounted("xfs", writer)))
	must(t, v.unstage())
	uuid := sh(t, "blkid", "-p", "-o", "value", "-s", "UUID", v.dev)
	v.annotate(api.AnnotationMkfs, "xfs")
	must(t, v.stage(mounted("xfs", writer)))
	if now := sh(t, "blkid", "-p", "-o", "value", "-s", "UUID", v.dev); now != uuid {
		t.Error("a complete file system was made again")
	}
	if v.annotation(api.AnnotationMkfs) != "" || v.annotation(api.AnnotationFS) != "xfs" {
		t.Errorf("annotations %v", v.vol.Annotations)
	}
}
