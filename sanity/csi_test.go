package sanity_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	ginkgotypes "github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
)

// canary is a secret; no log may have it.
const canary = "c4n4ry-s3cr3t"

var secrets = `
CreateVolumeSecret: {key: ` + canary + `}
DeleteVolumeSecret: {key: ` + canary + `}
ControllerPublishVolumeSecret: {key: ` + canary + `}
ControllerUnpublishVolumeSecret: {key: ` + canary + `}
ControllerValidateVolumeCapabilitiesSecret: {key: ` + canary + `}
NodeStageVolumeSecret: {key: ` + canary + `}
NodePublishVolumeSecret: {key: ` + canary + `}
ControllerExpandVolumeSecret: {key: ` + canary + `}
ControllerModifyVolumeSecret: {key: ` + canary + `}
`

// TestCSISanity runs the community's tests of CSI drivers against `drover serve`, for file systems and for block
// devices.
func TestCSISanity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.set("volume-attach-limit", "5") // the test of the limit attaches as many volumes
	must(t, os.WriteFile(w.path("secrets"), []byte(secrets), 0o600))

	gomega.RegisterFailHandler(ginkgo.Fail)
	for _, access := range []string{"mount", "block"} {
		cfg := sanity.NewTestConfig()
		cfg.Address = "unix://" + w.path("state", "csi.sock")
		cfg.SecretsFile = w.path("secrets")
		cfg.TestVolumeAccessType = access
		cfg.TargetPath, cfg.StagingPath = w.path("mount"), w.path("staging")
		cfg.TestVolumeParameters = map[string]string{"numberOfReplicas": "1", "staleReplicaTimeout": "30"}
		cfg.TestVolumeMutableParameters = map[string]string{"staleReplicaTimeout": "60"}
		cfg.TestNodeVolumeAttachLimit = true
		ginkgo.Describe(access, func() {
			sc := sanity.GinkgoTest(&cfg)
			ginkgo.AfterAll(sc.Finalize)
		}, ginkgo.Ordered, ginkgo.ContinueOnFailure)
	}
	ran := 0
	ginkgo.ReportAfterEach(func(r ginkgo.SpecReport) {
		switch {
		case r.State.Is(ginkgotypes.SpecStateSkipped):
			t.Errorf("skipped: %s: %s", r.FullText(), r.Failure.Message)
		case r.State.Is(ginkgotypes.SpecStatePassed):
			ran++
		}
	})
	suite, reporter := ginkgo.GinkgoConfiguration()
	reporter.Succinct = !testing.Verbose()
	reporter.NoColor = true
	ginkgo.RunSpecs(t, "csi-sanity", suite, reporter)
	if ran < 100 {
		t.Errorf("only %d tests ran", ran)
	}
	t.Logf("%d tests of csi-sanity passed", ran)

	logs := []string{w.log.Name()}
	more, err := filepath.Glob(w.path("state", "log", "*"))
	must(t, err)
	for _, name := range append(logs, more...) {
		b, err := os.ReadFile(name)
		must(t, err)
		if strings.Contains(string(b), canary) {
			t.Errorf("a secret is in the log %s", name)
		}
	}
}
