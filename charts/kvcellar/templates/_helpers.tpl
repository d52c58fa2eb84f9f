{{/* Names. At most 50 characters, so that every suffix fits into a label and a Service's name. */}}
{{- define "kvcellar.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "kvcellar.fullname" -}}
{{- $name := include "kvcellar.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "kvcellar.webhookName" -}}
{{- include "kvcellar.fullname" . }}-webhook
{{- end }}

{{- define "kvcellar.controllerName" -}}
{{- include "kvcellar.fullname" . }}-controller
{{- end }}

{{/*
The API server asks webhooks in the order of their configurations' names. Ours should come late: it has to
see the containers that others add, and some of them drop what was added before their turn.
*/}}
{{- define "kvcellar.configurationName" -}}
zz-{{ include "kvcellar.fullname" . }}
{{- end }}

{{- define "kvcellar.profileName" -}}
{{- include "kvcellar.fullname" . }}-default-profile
{{- end }}

{{/* The Secret of the webhook's certificate, whoever makes it. */}}
{{- define "kvcellar.tlsSecretName" -}}
{{- if eq .Values.certificates.source "secret" -}}
{{- required "certificates.secretName is needed with certificates.source: secret" .Values.certificates.secretName -}}
{{- else -}}
{{- include "kvcellar.webhookName" . }}-tls
{{- end -}}
{{- end }}

{{- define "kvcellar.caName" -}}
{{- include "kvcellar.webhookName" . }}-ca
{{- end }}

{{/* Labels of every object, and those by which a component's pods are selected. */}}
{{- define "kvcellar.labels" -}}
app.kubernetes.io/name: {{ include "kvcellar.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvcellar.releaseSelector" -}}
app.kubernetes.io/name: {{ include "kvcellar.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvcellar.webhookSelector" -}}
{{ include "kvcellar.releaseSelector" . }}
app.kubernetes.io/component: webhook
{{- end }}

{{- define "kvcellar.controllerSelector" -}}
{{ include "kvcellar.releaseSelector" . }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "kvcellar.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Where pods are looked at: the selector of the webhook and of the admission policy. */}}
{{- define "kvcellar.namespaceSelector" -}}
{{- if .Values.watchNamespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values:
      {{- toYaml .Values.watchNamespaces | nindent 6 }}
{{- else if .Values.webhook.excludeNamespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- toYaml .Values.webhook.excludeNamespaces | nindent 6 }}
{{- else -}}
{}
{{- end -}}
{{- end }}

{{/* Arguments that both programs take. */}}
{{- define "kvcellar.arguments" -}}
- --namespace={{ .Release.Namespace }}
{{- range .Values.watchNamespaces }}
- --watch-namespace={{ . }}
{{- end }}
- --health-port={{ int64 .Values.healthPort }}
- --log-level={{ .Values.logLevel }}
{{- end }}

{{/* What the restricted Pod Security Standard asks for. */}}
{{- define "kvcellar.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvcellar.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvcellar.probes" -}}
livenessProbe:
  httpGet:
    path: /livez
    port: health
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /readyz
    port: health
  periodSeconds: 2
  timeoutSeconds: 2
{{- end }}

{{/* Where the operator's pods run. */}}
{{- define "kvcellar.scheduling" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Rules that hold wherever pods are looked at: in a ClusterRole, or in a Role of each of the namespaces.
Each is what the program asks for at its start (`needs` in webhook.py and controller.py), and no more.
*/}}
{{- define "kvcellar.webhookRules" -}}
# A copy of the profiles in memory, so that a review costs no request.
- apiGroups: [kvcellar.dev]
  resources: [offloadprofiles]
  verbs: [list, watch]
{{- end }}

{{- define "kvcellar.controllerRules" -}}
# Pods that have opted in; patch for the one annotation that relays what an OffloadRegion asks for.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# An OffloadRegion for each engine; it goes with its pod, so nothing is deleted.
- apiGroups: [kvcellar.dev]
  resources: [offloadregions]
  verbs: [list, watch, create]
# Their status; what people write in their spec stays theirs.
- apiGroups: [kvcellar.dev]
  resources: [offloadregions/status]
  verbs: [patch]
# Events of pods that were refused are read; own ones are made, and counted on.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, watch, create, patch]
# Whether what could not create a pod had asked for injection.
- apiGroups: [apps]
  resources: [replicasets, statefulsets]
  verbs: [get]
{{- end }}

{{/* helm test */}}
{{- define "kvcellar.testName" -}}
{{- include "kvcellar.fullname" . }}-test
{{- end }}

{{/* Where the test's pod is tried, without creating it. */}}
{{- define "kvcellar.testNamespace" -}}
{{- if and .Values.watchNamespaces (not (has .Release.Namespace .Values.watchNamespaces)) -}}
{{- first .Values.watchNamespaces -}}
{{- else -}}
{{- .Release.Namespace -}}
{{- end -}}
{{- end }}

{{/* The rights of the test exist while it runs. */}}
{{- define "kvcellar.testRightsAnnotations" -}}
helm.sh/hook: test
helm.sh/hook-weight: "-1"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end }}
