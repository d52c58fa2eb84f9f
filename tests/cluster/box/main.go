// Every program of the box in one binary, which runs the one that it is called as: a
// link of that name leads to it. They share most of their code, so one binary is linked
// once and takes a third of the space.
//
// Only the entry points of the programs are named here. What they do is told by their
// flags, which the Python side of the box writes.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	helmkube "helm.sh/helm/v4/pkg/kube"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs is what the binary can be called as. Each gets the whole command line and
// returns the exit status, if it returns.
var programs = map[string]func(arguments []string) int{
	"etcd": func(arguments []string) int {
		etcdmain.Main(arguments)
		return 0
	},
	"helm":                    runHelm,
	"kube-apiserver":          component(apiserver.NewAPIServerCommand),
	"kube-controller-manager": component(controllers.NewControllerManagerCommand),
	"kube-proxy":              component(proxy.NewProxyCommand),
	"kube-scheduler":          component(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubectl":                 runKubectl,
	"kubelet":                 component(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
}

// component wraps a part of the cluster. Its command is made only when it is asked for:
// making one already registers flags and metrics that the others register too.
func component(command func() *cobra.Command) func([]string) int {
	return func([]string) int { return cli.Run(command()) }
}

func runKubectl(arguments []string) int {
	// Before the command is made, since making it already logs.
	_, _ = logs.GlogSetter(kubectl.GetLogVerbosity(arguments))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}

func runHelm(arguments []string) int {
	// Else field managers would be named after the link.
	helmkube.ManagedFieldsManager = "helm"
	command, err := helm.NewRootCmd(os.Stdout, arguments[1:], helm.SetupLogging)
	if err == nil {
		err = command.Execute()
	}
	var failed helm.CommandError
	switch {
	case errors.As(err, &failed):
		return failed.ExitCode
	case err != nil:
		return 1
	}
	return 0
}

func main() {
	name := filepath.Base(os.Args[0])
	run, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s is no program of the box: call it by a link of a program's name\n", name)
		os.Exit(2)
	}
	os.Exit(run(os.Args))
}
