package sanity_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	mib = int64(1) << 20
	gib = int64(1) << 30
)

func mountCap(fs string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}},
	}
}

func blockCap() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// pod is a volume used by a workload, with the paths that a CO chooses.
type pod struct {
	w       *world
	id      string
	cap     *csi.VolumeCapability
	staging string
	target  string
}

func (w *world) create(name string, size int64, c *csi.VolumeCapability, parameters ...string) (*pod, error) {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters: map[string]string{}}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	for i := 0; i < len(parameters); i += 2 {
		req.Parameters[parameters[i]] = parameters[i+1]
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	res, err := w.controller.CreateVolume(ctx, req)
	if err != nil {
		return nil, err
	}
	id := res.Volume.VolumeId
	return &pod{w: w, id: id, cap: c, staging: w.path(id + "-staging"), target: w.path(id + "-target")}, nil
}

func (p *pod) up() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	if err := os.MkdirAll(p.staging, 0o700); err != nil {
		return err
	}
	if _, err := p.w.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: p.id,
		NodeId: p.w.name, VolumeCapability: p.cap}); err != nil {
		return err
	}
	if _, err := p.w.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: p.id, StagingTargetPath: p.staging,
		VolumeCapability: p.cap}); err != nil {
		return err
	}
	_, err := p.w.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: p.id,
		StagingTargetPath: p.staging, TargetPath: p.target, VolumeCapability: p.cap})
	return err
}

// down does as a CO does, and asks again while the volume is in use. The user may just be ending, such as a loop
// device on a file of the volume, which the kernel releases a moment after the unmount.
func (p *pod) down() (err error) {
	p.w.t.Helper()
	comes(func() bool { err = p.leave(); return status.Code(err) != codes.FailedPrecondition })
	return err
}

func (p *pod) leave() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	if _, err := p.w.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.id,
		TargetPath: p.target}); err != nil {
		return err
	}
	if _, err := p.w.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: p.id,
		StagingTargetPath: p.staging}); err != nil {
		return err
	}
	_, err := p.w.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: p.id,
		NodeId: p.w.name})
	return err
}

func (p *pod) remove() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	_, err := p.w.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: p.id})
	return err
}

func (p *pod) expand(size int64) error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	res, err := p.w.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: p.id,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: p.cap})
	if err == nil && res.CapacityBytes != size {
		err = fmt.Errorf("expanded to %d bytes, not %d", res.CapacityBytes, size)
	}
	return err
}

func (p *pod) expandNode(size int64) error {
	_, err := p.w.node.NodeExpandVolume(p.w.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: p.id,
		VolumePath: p.target, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: p.cap})
	return err
}

func (p *pod) total() int64 {
	p.w.t.Helper()
	r, err := p.w.node.NodeGetVolumeStats(p.w.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: p.id,
		VolumePath: p.target})
	must(p.w.t, err)
	return r.Usage[0].Total
}

func (p *pod) file(name string) string { return filepath.Join(p.target, name) }

// write makes a file of random bytes, durable, and returns its sum.
func (p *pod) write(name string, size int64) [32]byte {
	p.w.t.Helper()
	b := make([]byte, size)
	seed := sha256.Sum256([]byte(p.id + name))
	_, _ = rand.NewChaCha8(seed).Read(b)
	f, err := os.Create(p.file(name))
	must(p.w.t, err)
	_, err = f.Write(b)
	must(p.w.t, err)
	must(p.w.t, f.Sync())
	must(p.w.t, f.Close())
	return sha256.Sum256(b)
}

func (p *pod) check(name string, sum [32]byte) {
	p.w.t.Helper()
	b, err := os.ReadFile(p.file(name))
	must(p.w.t, err)
	if sha256.Sum256(b) != sum {
		p.w.t.Errorf("volume %s: file %s is not what was written", p.id, name)
	}
}

func wantCode(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("code %v, want %v: %v", status.Code(err), code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func do(t *testing.T, steps ...func() error) {
	t.Helper()
	for _, s := range steps {
		must(t, s())
	}
}
